"""Question: how much does a draft gain from the target's hidden states?

Varies: draft.conditioning: with `none` the projection of the target's states is zero and stays so, in training and in
    decoding; the draft then knows its anchor alone.
Run:    python experiments/ablate_conditioning.py --seeds 0,1
Writes: as sweep_block_size.py, under outputs/ablate_conditioning/<UTC time>.
Cost:   as two times train.py for each seed; --dry-run tells.
Source: arXiv:2602.06036, table 10.
"""

from __future__ import annotations

from collections.abc import Sequence

from draftlab import cli


def main(argv: Sequence[str] | None = None) -> int:
    sweep = cli.Sweep("ablate_conditioning", __doc__, baseline="conditioning_none")
    sweep.vary("--conditioning", "draft.conditioning", ["target", "none"])
    return sweep.run(argv)


if __name__ == "__main__":
    cli.main(main)
