"""Question: are anchors drawn at random better than a fixed cut into blocks?

Varies: train.anchor_choice: `random` draws anchors from all positions, `blocks` from every B-th one.
Run:    python experiments/ablate_anchors.py --seeds 0,1
Writes: as sweep_block_size.py, under outputs/ablate_anchors/<UTC time>.
Cost:   as two times train.py for each seed; --dry-run tells.
Source: arXiv:2602.06036, table 13: 14 to 19% more acceptance with random anchors.
"""

from __future__ import annotations

from collections.abc import Sequence

from draftlab import cli


def main(argv: Sequence[str] | None = None) -> int:
    sweep = cli.Sweep("ablate_anchors", __doc__, baseline="anchor_choice_blocks")
    sweep.vary("--choices", "train.anchor_choice", ["random", "blocks"])
    return sweep.run(argv)


if __name__ == "__main__":
    cli.main(main)
