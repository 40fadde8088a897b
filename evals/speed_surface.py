"""Question: at which block size should this draft be served, by domain and by load?

Varies: block size, batch size and context length of single calls; what they cost and how far blocks survive predicts
    the speed everywhere, and decoding at --block-sizes shows how well.
Run:    python evals/speed_surface.py --ckpt CKPT --prompts heldout,humaneval
        python evals/speed_surface.py --ckpt CKPT --block-sizes 2,4,8,16 --batches 1,4,8 --contexts 64,256,1024
    CKPT and --prompts as in evals/acceptance.py; humaneval needs '.[test]'. Blocks are verified whole,
    whatever eval.schedule says.
Writes: surface.csv (speed by domain, batch and block size; the gain of each slot; the break-even acceptance),
    prediction.csv (beside the measurement), surface.png and what evals/acceptance.py writes, under --out (default
    outputs/speed_surface/<UTC time>), and an MLflow run with the same.
Cost:   a decoding of each prompt for every block size and one for the target; 6 minutes on two CPU cores.
Source: speedup = tokens per round * T_target / (T_draft + T_verify), arXiv:2602.06036.
Exit:   0; 1 if a prompt failed, or in float32 an output was not the target's own; 2 for what the user can mend.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from draftlab import cli, config
from draftlab.errors import UserError


def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.eval_parser(__doc__)
    parser.add_argument("--block-sizes", type=cli.integers, default=[2, 4, 8, 16], help="timed and decoded with")
    parser.add_argument("--batches", type=cli.integers, default=[1, 4], help="prompts at once that are timed")
    parser.add_argument("--contexts", type=cli.integers, default=[64, 128, 256], help="context lengths that are timed")
    args = parser.parse_args(argv)
    cli.check_taken(args.overrides, {"eval.block_sizes": "--block-sizes"})
    out = cli.out_folder("speed_surface", args)
    base = config.load(args.config or config.DEFAULT_CONFIG, args.overrides)
    if len(args.ckpt) > 1 or min(*args.block_sizes, 2) < 2 or min(*args.batches, *args.contexts, 1) < 1:
        raise UserError("expected one --ckpt, --block-sizes of at least 2, --batches and --contexts of at least 1")

    with cli.Progress("loading the draft and its target") as say, tempfile.TemporaryDirectory() as fetched:
        say(f"speed surface of {args.ckpt[0]}")
        from draftlab import drafts, evaluation, report, surface  # slow: after the first line is out
        from draftlab.tracking import Store

        report.check_folder(out)
        store = Store(base.tracking, Path("outputs"))
        field = drafts.load_field(args.ckpt, args.config, args.overrides, lambda: store, Path(fetched), say)
        run, target = field.run, field.target
        prompts = field.prompts(args.prompts, say)
        (draft,) = field.drafts.values()
        longest = max(args.contexts) + surface.most_tokens(max(args.block_sizes))
        if longest > (room := min(target.max_positions, draft.spec.max_position_embeddings)):
            most = room - longest + max(args.contexts)
            raise UserError(f"--contexts: expected at most {most}, for the models' positions; got {max(args.contexts)}")
        batches = sorted({*args.batches, run.eval.batch_size})
        hashes = ", ".join(field.hashes.values())
        params = run.flat() | {"ckpt": args.ckpt[0], "checkpoint": hashes, "prompts": args.prompts}
        with store.run(f"speed surface {hashes}", params) as run_id:
            found = evaluation.evaluate(
                target, field.drafts, prompts, run.eval, say, run.seed, field.hashes, sorted(args.block_sizes),
                ["fixed"],
            )  # fmt: skip
            report.write_evaluation(found, out)
            measured = [result.metrics | result.provenance for result in found.values()]
            largest = list(found.values())[-1]
            texts = [pair.case.ids + pair.target.tokens for pair in largest.traces]
            if not texts:
                raise UserError(f"no prompt was decoded; {out / 'results.json'} gives the reasons")
            sampling = evaluation.sampling_of(run.eval, run.seed)
            times = surface.measure(
                target, draft, texts, args.block_sizes, batches, args.contexts, say, sampling
            )
            survivals = {"all": largest.survival} | evaluation.survival_by_domain(largest)
            rows = [
                {"domain": domain, **row}
                for domain, survival in survivals.items()
                for batch in batches
                for row in surface.predict(times, survival, batch)
            ]
            ours = [row for row in rows if row["domain"] == "all" and row["batch_size"] == run.eval.batch_size]
            compared = surface.against_measurement(ours, measured)
            report.write_surface(rows, compared, out)
            store.log_evaluations(run_id, found, args.prompts, field.folders, out)
        say(f"speed by block size\n{report.surface_table(surface.best_by_group(rows), compared)}")
        within = "the measured best or within its interval" if surface.agrees(compared) else "not the measured best"
        say(f"the predicted best block size at batch {run.eval.batch_size} is {within}")
        say(f"results: {out}\nMLflow run {run_id}: {store.ui_command}")
    return evaluation.exit_code(found.values())


if __name__ == "__main__":
    cli.main(main)
