"""Question: which block size, decay, tapped layers and depth together make the best draft?

Varies: draft.block_size, loss.gamma, draft.num_target_layers and draft.num_hidden_layers, searched: by default Optuna
    chooses 16 of the combinations, each by the held-out acceptance of those before it. So does ASHA choose those that
    go on; only what is trained to its end is decoded and ranked by speed (search.rank_by).
Run:    python experiments/sweep_joint.py --samples 16 --scheduler asha
        python experiments/sweep_joint.py --search grid --block-sizes 8,16 --gammas 4,7 --layers 5 --depths 3
Writes: as sweep_block_size.py, under outputs/sweep_joint/<UTC time>.
Cost:   16 times train.py, about half of that with --scheduler asha; --dry-run tells.
Source: none: the papers vary one of them at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

from draftlab import cli


def main(argv: Sequence[str] | None = None) -> int:
    sweep = cli.Sweep("sweep_joint", __doc__, defaults={"search": {"method": "optuna", "samples": 16}})
    sweep.vary("--block-sizes", "draft.block_size", [4, 8, 16])
    sweep.vary("--gammas", "loss.gamma", [2, 4, 7, float("inf")])
    sweep.vary("--layers", "draft.num_target_layers", [1, 3, 5])
    sweep.vary("--depths", "draft.num_hidden_layers", [1, 2, 3])
    return sweep.run(argv)


if __name__ == "__main__":
    cli.main(main)
