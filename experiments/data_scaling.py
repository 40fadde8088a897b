"""Question: how much does a draft gain from more conversations to train on?

Varies: train.conversations (--conversations), the steps staying the same: fewer conversations are seen more often. The
    larger sets hold the smaller ones.
Run:    python experiments/data_scaling.py --seeds 0,1
        python experiments/data_scaling.py --conversations 450,900,1750 corpus.conversations=2000
Writes: as sweep_block_size.py, under outputs/data_scaling/<UTC time>.
Cost:   as one train.py for each number and seed; --dry-run tells.
Source: DFlare, arXiv:2606.02091: 4.90, 6.59 and 7.33 tokens per round from 270,000, 800,000 and 2,400,000 samples.
"""

from __future__ import annotations

from collections.abc import Sequence

from draftlab import cli


def main(argv: Sequence[str] | None = None) -> int:
    sweep = cli.Sweep("data_scaling", __doc__)
    sweep.vary("--conversations", "train.conversations", [125, 250, 500, 1000])
    return sweep.run(argv)


if __name__ == "__main__":
    cli.main(main)
