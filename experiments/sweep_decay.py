"""Question: how fast should the loss weight decay along the block?

Varies: the weights along the block (--decays): a number is gamma, the length of an exponential decay in tokens; inf is
    no decay; dpace weighs each slot by the tokens that decoding may be expected to accept from it on. The published
    gammas are 7 for blocks of 16, 5 for 10 and 4 for 8.
Run:    python experiments/sweep_decay.py draft.block_size=16 --seeds 0,1
        python experiments/sweep_decay.py --config configs/tiny.yaml --decays 1,inf,dpace
Writes: as sweep_block_size.py, under outputs/sweep_decay/<UTC time>.
Cost:   as one train.py for each decay and seed; --dry-run tells.
Source: arXiv:2602.06036, equation 4; no gamma but those three has been published. D-PACE: arXiv:2605.18810.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from draftlab import cli

DECAYS = ("1", "2", "4", "7", "15", "inf", "dpace")


def main(argv: Sequence[str] | None = None) -> int:
    sweep = cli.Sweep("sweep_decay", __doc__)
    sweep.vary("--decays", "decay", dict(map(decay, DECAYS)), decay)
    return sweep.run(argv)


def decay(text: str) -> cli.Variation:
    """The name and the settings of one decay."""
    if text == "dpace":
        return text, {"loss.positions": "dpace", "loss.gamma": "tied"}
    try:
        gamma = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers, inf or dpace, got {text!r}") from None
    return f"gamma_{gamma:g}", {"loss.positions": "decay", "loss.gamma": gamma}


if __name__ == "__main__":
    cli.main(main)
