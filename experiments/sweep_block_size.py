"""Question: which block size makes the best draft for a target?

Varies: draft.block_size (--block-sizes); with `loss.gamma: tied` the loss decay follows it as published. Target,
    corpus, data order, held-out set and decoded prompts are the same for all.
Run:    python experiments/sweep_block_size.py
        python experiments/sweep_block_size.py --config configs/tiny.yaml --block-sizes 2,4 train.steps=20
        python experiments/sweep_block_size.py --resume outputs/sweep_block_size/20260101T000000Z
Writes: results.csv, acceptance.png, survival.png, training.png and each trial's draft under --out
    (default outputs/sweep_block_size/<UTC time>); a parent run in MLflow with a child for each trial.
Cost:   the default takes 20 minutes on two CPU cores.
Source: arXiv:2602.06036, whose drafts have blocks of 16, 10 and 8 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from draftlab import cli, config
from draftlab.errors import UserError

BLOCK_SIZES = "4,8,16"


def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.run_parser(__doc__)
    parser.add_argument("--block-sizes", default=BLOCK_SIZES, metavar="N,N,...", help=f"default {BLOCK_SIZES}")
    parser.add_argument("--out", type=Path, help="the sweep's folder; must not exist yet")
    parser.add_argument("--resume", type=Path, metavar="FOLDER", help="go on with an interrupted sweep")
    args = parser.parse_args(argv)
    if args.resume and (args.out or args.overrides):
        raise UserError("--resume takes everything from the folder; expected no --out and no overrides")
    with cli.Progress("loading torch, Ray and MLflow") as say:
        if args.resume:
            say(f"going on with {args.resume}")
            from draftlab import sweep  # slow: after the first line is out

            return sweep.resume(args.resume, say)
        base = config.load(args.config, args.overrides)
        sizes = _sizes(args.block_sizes)
        say(f"block sizes {', '.join(map(str, sizes))} for {base.target.model}")
        from draftlab import sweep

        return sweep.start("sweep_block_size", base, {"draft.block_size": sizes}, args.out, say)


def _sizes(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--block-sizes: expected whole numbers like {BLOCK_SIZES}, got {text!r}") from None


if __name__ == "__main__":
    cli.main(main)
