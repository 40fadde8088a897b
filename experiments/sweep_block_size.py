"""Question: which block size makes the best draft for a target?

Varies: draft.block_size (--block-sizes); with `loss.gamma: tied` the loss decay follows it as published. Target,
    corpus, data order, held-out set and decoded prompts are the same for all. With --decode-sizes every draft is also
    decoded with block sizes that it was not trained with: the table of trained by decoded block size.
Run:    python experiments/sweep_block_size.py
        python experiments/sweep_block_size.py --config configs/tiny.yaml --block-sizes 2,4 train.steps=20
        python experiments/sweep_block_size.py --decode-sizes 4,8,16
        python experiments/sweep_block_size.py --resume outputs/sweep_block_size/20260101T000000Z
Writes: report.md, results.csv, verdicts.csv, figures and each trial's draft under --out
    (default outputs/sweep_block_size/<UTC time>), block_sizes.csv with --decode-sizes; a parent run in MLflow with a
    child for each trial.
Cost:   the default takes 19 minutes on two CPU cores, --decode-sizes 4,8,16 about 5 more.
Source: arXiv:2602.06036, whose drafts have blocks of 16, 10 and 8 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from draftlab import cli


def main(argv: Sequence[str] | None = None) -> int:
    sweep = cli.Sweep("sweep_block_size", __doc__)
    sweep.vary("--block-sizes", "draft.block_size", [4, 8, 16])
    return sweep.run(argv)


if __name__ == "__main__":
    cli.main(main)
