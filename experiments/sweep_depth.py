"""Question: how many layers should a draft have?

Varies: draft.num_hidden_layers (--depths).
Run:    python experiments/sweep_depth.py --seeds 0,1
        python experiments/sweep_depth.py --config configs/tiny.yaml --depths 1,2
Writes: as sweep_block_size.py, under outputs/sweep_depth/<UTC time>.
Cost:   as one train.py for each value and seed; --dry-run tells.
Source: arXiv:2602.06036, table 6: acceptance rises from 3 to 8 layers, speedup is flat with its peak at 5.
"""

from __future__ import annotations

from collections.abc import Sequence

from draftlab import cli


def main(argv: Sequence[str] | None = None) -> int:
    sweep = cli.Sweep("sweep_depth", __doc__)
    sweep.vary("--depths", "draft.num_hidden_layers", [1, 2, 3, 5])
    return sweep.run(argv)


if __name__ == "__main__":
    cli.main(main)
