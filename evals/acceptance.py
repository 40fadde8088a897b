"""Question: how many tokens does a round of this draft commit, and how much faster is decoding with it?

Varies: nothing; one draft against its target alone, prompt by prompt, in one process.
Run:    python evals/acceptance.py --ckpt CKPT
        python evals/acceptance.py --ckpt CKPT --prompts humaneval:40 eval.repeats=3 target.dtype=float32
        python evals/acceptance.py --ckpt z-lab/Qwen3-8B-DFlash-b16 --prompts humaneval target.model=Qwen/Qwen3-8B
    CKPT is a checkpoint folder, an MLflow run id or models:/ URI, or the hub id of a published DFlash draft. The
    configuration is the checkpoint's own (a published draft has none), unless --config gives another.
Writes: results.json, survival.png and first_failure.png under --out (default outputs/acceptance/<UTC time>), and an
    MLflow run with the same.
Cost:   two decodings of each prompt; about 2 minutes for the default 16 prompts on two CPU cores.
Source: greedy protocol and metrics of arXiv:2602.06036, as platform/draftlab/metrics.py defines them.
Exit:   0; 1 if a prompt failed, or in float32 an output was not the target's own; 2 for what the user can mend.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from draftlab import cli, config


def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.run_parser(__doc__)
    parser.set_defaults(config=None)
    parser.add_argument("--ckpt", required=True, help="folder, MLflow run id, models:/ URI, or hub id")
    parser.add_argument("--prompts", default="heldout", help="heldout, humaneval or a .jsonl file; :N takes N of them")
    parser.add_argument("--out", type=Path, help="results folder")
    args = parser.parse_args(argv)
    out = args.out or Path("outputs/acceptance") / datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    base = config.load(args.config or config.DEFAULT_CONFIG, args.overrides)

    with cli.Progress("loading the draft and its target") as say, tempfile.TemporaryDirectory() as fetched:
        say(f"acceptance of {args.ckpt}")
        from draftlab import drafts, evaluation, report  # slow: after the first line is out
        from draftlab.target import load_target
        from draftlab.tracking import Store

        report.check_folder(out)
        store = Store(base.tracking, Path("outputs"))
        draft, info, run = drafts.load_draft(args.ckpt, args.config, args.overrides, store, Path(fetched))
        target = load_target(run.target)
        drafts.check_target(draft, info, target)
        say(f"draft {info.hash} with blocks of {draft.spec.block_size}, target {target.name} in {run.target.dtype}")
        prompts = [target.chat(messages) for messages in evaluation.load_prompts(args.prompts, run, target, say)]

        params = run.flat() | {"ckpt": args.ckpt, "checkpoint": info.hash, "prompts": args.prompts}
        run_id = store.start_run(f"acceptance {info.hash}", key=f"acceptance/{out.absolute()}", params=params)
        try:
            named = {args.ckpt: draft.to(target.device, target.dtype)}
            (result,) = evaluation.evaluate(
                target, named, prompts, run.eval, say, run.seed, {args.ckpt: info.hash}
            ).values()
            report.write_evaluation({args.ckpt: result}, out)
            data = (args.prompts, result.provenance["prompts_hash"])
            store.log_dataset(run_id, *data, source=args.prompts, context="evaluation")
            store.log_metrics(run_id, result.metrics, dataset=data)
            store.log_table(run_id, result.prompts, "prompts.csv")
            store.log_artifacts(run_id, out)
        except BaseException as error:
            status = "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED"
            store.end_run(run_id, status, f"{type(error).__name__}: {error}")
            raise
        store.end_run(run_id, "FINISHED")
        say(f"done\n{evaluation.describe(result)}\nresults: {out}\nMLflow run {run_id}: {store.ui_command}")
    wrong = run.target.dtype == "float32" and result.metrics["divergences"] > 0
    return 1 if result.metrics["failed"] or wrong else 0


if __name__ == "__main__":
    cli.main(main)
