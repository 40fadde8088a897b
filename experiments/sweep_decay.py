"""Question: how fast should the loss weight decay along the block?

Varies: loss.gamma (--gammas); the published pairs are 7 for blocks of 16, 5 for 10 and 4 for 8; inf is no decay.
Run:    python experiments/sweep_decay.py draft.block_size=16 --seeds 0,1
        python experiments/sweep_decay.py --config configs/tiny.yaml --gammas 1,inf
Writes: as sweep_block_size.py, under outputs/sweep_decay/<UTC time>.
Cost:   as one train.py for each value and seed; --dry-run tells.
Source: arXiv:2602.06036, equation 4; no value but those three has been published.
"""

from __future__ import annotations

from collections.abc import Sequence

from draftlab import cli


def main(argv: Sequence[str] | None = None) -> int:
    sweep = cli.Sweep("sweep_decay", __doc__)
    sweep.vary("--gammas", "loss.gamma", [1, 2, 4, 7, 15, float("inf")])
    return sweep.run(argv)


if __name__ == "__main__":
    cli.main(main)
