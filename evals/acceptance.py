"""Question: how many tokens does a round of this draft commit, and how much faster is decoding with it?

Varies: nothing, or the block size that is decoded with; target and drafts decode batch by batch, in one process.
Run:    python evals/acceptance.py --ckpt CKPT
        python evals/acceptance.py --ckpt CKPT --prompts humaneval:40,chat.jsonl eval.repeats=3 target.dtype=float32
        python evals/acceptance.py --ckpt CKPT --block-sizes 2,4,8,16 eval.batch_size=4
        python evals/acceptance.py --ckpt CKPT eval.temperature=1 eval.top_p=0.95 eval.mode=greedy_draft
        python evals/acceptance.py --ckpt CKPT eval.schedule=confidence
        python evals/acceptance.py --ckpt z-lab/Qwen3-8B-DFlash-b16 --prompts gsm8k target.model=Qwen/Qwen3-8B
    CKPT is a checkpoint folder, an MLflow run id or models:/ URI, or the hub id of a published DFlash draft. Several
    --ckpt with --block-sizes give the table of trained by decoded block size. The configuration is the first
    checkpoint's own (a published draft has none), unless --config gives another; but the store is that of tracking.uri
    here, whatever the training's was. Of a confidence head the calibration error (ECE), AUC and Brier score are told;
    eval.schedule=confidence has it choose how much of a block is verified.
Writes: results.json, breakdown.csv (by domain, turn, context length and position), traces.jsonl and figures under --out
    (default outputs/acceptance/<UTC time>), and an MLflow run with the same, linked to the checkpoint's training run.
Cost:   two decodings of each prompt; about 2 minutes for the default 16 prompts on two CPU cores.
Source: greedy protocol and metrics of arXiv:2602.06036, as platform/draftlab/metrics.py defines them.
Exit:   0; 1 if a prompt failed, or in float32 an output was not the target's own; 2 for what the user can mend.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from draftlab import cli, config


def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.eval_parser(__doc__)
    parser.add_argument("--block-sizes", type=cli.integers, help="decode with each of these, such as 2,4,8,16")
    args = parser.parse_args(argv)
    cli.check_taken(args.overrides, {"eval.block_sizes": "--block-sizes"})
    out = cli.out_folder("acceptance", args)
    base = config.load(args.config or config.DEFAULT_CONFIG, args.overrides)

    with cli.Progress("loading the draft and its target") as say, tempfile.TemporaryDirectory() as fetched:
        say(f"acceptance of {', '.join(args.ckpt)}")
        from draftlab import drafts, evaluation, report  # slow: after the first line is out
        from draftlab.tracking import Store

        report.check_folder(out)
        store = Store(base.tracking, Path("outputs"))
        field = drafts.load_field(args.ckpt, args.config, args.overrides, lambda: store, Path(fetched), say)
        run, target = field.run, field.target
        prompts = field.prompts(args.prompts, say)
        hashes = ", ".join(field.hashes.values())
        params = run.flat() | {"ckpt": ", ".join(args.ckpt), "checkpoint": hashes, "prompts": args.prompts}
        with store.run(f"acceptance {hashes}", params) as run_id:
            found = evaluation.evaluate(
                target, field.drafts, prompts, run.eval, say, run.seed, field.hashes, args.block_sizes
            )
            report.write_evaluation(found, out)
            store.log_evaluations(run_id, found, args.prompts, field.folders, out)
        for name, result in found.items():
            say(f"{name}\n{evaluation.describe(result)}")
        if len(found) > 1:
            say(f"trained by decoded block size\n{report.block_size_table(report.by_block_size(found))}")
        say(f"results: {out}\nMLflow run {run_id}: {store.ui_command}")
    return evaluation.exit_code(found.values())


if __name__ == "__main__":
    cli.main(main)
