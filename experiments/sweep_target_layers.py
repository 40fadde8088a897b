"""Question: how many of the target's layers should a draft read, and which?

Varies: the tapped layers (--layers): `uniform 3` is three spread evenly; early, middle, late, random, random1, ... are
    controls of a size; numbers are the layers themselves. One feature store serves all.
Run:    python experiments/sweep_target_layers.py --seeds 0,1
        python experiments/sweep_target_layers.py --layers "uniform 5; late 5; 1,8,14,20,27"
Writes: as sweep_block_size.py, under outputs/sweep_target_layers/<UTC time>.
Cost:   as one train.py for each choice and seed; --dry-run tells.
Source: arXiv:2602.06036, table 7: five uniform layers against three; which layers has not been published.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from draftlab import cli

LAYERS = ("uniform 1", "uniform 3", "uniform 5", "early 5", "middle 5", "late 5", "random 5")


def main(argv: Sequence[str] | None = None) -> int:
    sweep = cli.Sweep("sweep_target_layers", __doc__, baseline="uniform_5")
    sweep.vary("--layers", "layers", dict(map(choice, LAYERS)), choice, between=";")
    return sweep.run(argv)


def choice(text: str) -> cli.Variation:
    """The name and the settings of one choice."""
    words = text.replace(",", " ").split()
    if words and all(word.isdecimal() for word in words):
        settings = {"draft.target_layer_ids": [int(word) for word in words]}
    elif len(words) == 2 and words[1].isdecimal():
        settings = {"draft.layer_choice": words[0], "draft.num_target_layers": int(words[1])}
    else:
        raise argparse.ArgumentTypeError(f"expected `uniform 5` or layers like `1,8,14`, got {text!r}")
    return "_".join(words), settings


if __name__ == "__main__":
    cli.main(main)
