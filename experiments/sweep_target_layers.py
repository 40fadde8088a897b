"""Question: how many of the target's layers should a draft read, and which?

Varies: the tapped layers (--layers): `gate 5` is the five that a gate proposes; `uniform 3` three spread evenly; early,
    middle, late, random, random1, ... are controls of a size; numbers are the layers themselves. The gate, one softmax
    over all layers that can be tapped (or over features.layers), is trained first, once; then plain drafts with the
    layers of each choice, compared with `uniform 5`. One feature store, of all of these layers, serves all trials.
Run:    python experiments/sweep_target_layers.py --seeds 0,1
        python experiments/sweep_target_layers.py --layers "gate 3; uniform 3; late 3; 1,14,27" --baseline uniform_3
Writes: as sweep_block_size.py, under outputs/sweep_target_layers/<UTC time>; gate.png and gate.csv, the gate's shares.
Cost:   as one train.py for each choice and seed and one for the gate; --dry-run tells, and what the store takes.
Source: arXiv:2602.06036, table 7: five uniform layers against three; which layers has not been published.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from draftlab import cli

LAYERS = ("uniform 1", "uniform 3", "uniform 5", "gate 5", "early 5", "middle 5", "late 5", "random 5")

GATE = {"draft.variant": "gated", "loss.gate_entropy": 0.1}
"""The entropy penalty has the gate choose."""


def main(argv: Sequence[str] | None = None) -> int:
    sweep = cli.Sweep("sweep_target_layers", __doc__, baseline="uniform_5", probe=GATE)
    sweep.vary("--layers", "layers", dict(map(choice, LAYERS)), choice, between=";")
    return sweep.run(argv)


def choice(text: str) -> cli.Variation:
    """The name and the settings of one choice."""
    words = text.replace(",", " ").split()
    if words and all(word.isdecimal() for word in words):
        settings = {"draft.target_layer_ids": [int(word) for word in words]}
    elif len(words) == 2 and words[1].isdecimal():
        settings = {
            "draft.layer_choice": words[0], "draft.num_target_layers": int(words[1]), "draft.target_layer_ids": None
        }  # fmt: skip
    else:
        raise argparse.ArgumentTypeError(f"expected `gate 5`, `uniform 5` or layers like `1,8,14`, got {text!r}")
    return "_".join(words), settings


if __name__ == "__main__":
    cli.main(main)
