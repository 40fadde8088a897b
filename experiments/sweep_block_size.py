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

from draftlab import cli


def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.sweep_parser(__doc__)
    parser.add_argument("--block-sizes", type=cli.integers, default=[4, 8, 16], metavar="N,N,...", help="default 4,8,16")
    args = parser.parse_args(argv)
    return cli.run_sweep("sweep_block_size", args, {"draft.block_size": args.block_sizes})


if __name__ == "__main__":
    cli.main(main)
