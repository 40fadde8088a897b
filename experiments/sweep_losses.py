"""Question: which loss trains the best draft?

Varies: the loss (--losses): ce, against the corpus's tokens; l1, tv, kl, reverse_kl, topk_kl, lk, lk_hybrid, against
    the target's distribution; and ce_l1, a tenth of ce and nine tenths of l1.
Run:    python experiments/sweep_losses.py --seeds 0,1
        python experiments/sweep_losses.py --config configs/tiny.yaml --losses ce,kl,ce_l1
Writes: as sweep_block_size.py, under outputs/sweep_losses/<UTC time>.
Cost:   as one train.py for each loss and seed, more for those against the target; --dry-run tells.
Source: arXiv:2602.06036 trains with ce; ce_l1 is DSpark's mix.
"""

from __future__ import annotations

from collections.abc import Sequence

from draftlab import cli
from draftlab.config import DISTILLED


def main(argv: Sequence[str] | None = None) -> int:
    sweep = cli.Sweep("sweep_losses", __doc__, {"features": {"last_hidden": True}}, baseline="ce")
    alone = {term: mix(**{term: 1.0}) for term in ("ce", *DISTILLED)}
    sweep.vary("--losses", "loss", alone | {"ce_l1": mix(ce=0.1, l1=0.9)})
    return sweep.run(argv)


def mix(**weights: float) -> dict[str, float]:
    """The weights of all terms; of those not named, 0."""
    return {f"loss.{term}": weights.get(term, 0.0) for term in ("ce", *DISTILLED)}


if __name__ == "__main__":
    cli.main(main)
