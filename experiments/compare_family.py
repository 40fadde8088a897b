"""Question: which draft of the family is best for the same training time: DFlash, DFlare or DSpark?

Varies: the variant (--variants): dflash; dflare, whose layers each learn their own mix of the tapped layers; dspark,
    with its Markov and confidence heads and its loss, .1 ce + .9 l1 + 1 confidence. By default a block of each drafts
    7 tokens: dspark's of 7, since its anchor's slot drafts too, the others' of 8. `dspark:15` has blocks of 15.
Run:    python experiments/compare_family.py
        python experiments/compare_family.py train.seconds=3600 --seeds 0,1,2
        python experiments/compare_family.py --budget steps --variants dflash:16,dspark:15 --baseline dflash_16
Writes: as sweep_block_size.py, under outputs/compare_family/<UTC time>; a layer_mix.png for each dflare draft.
Cost:   a training of train.seconds, by default 300, for each variant and seed (0 and 1); --dry-run tells.
Source: arXiv:2602.06036 (DFlash), arXiv:2606.02091 (DFlare), DSpark's paper; each compares itself with other settings.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from draftlab import cli

VARIANTS = {
    "dflash": {"draft.variant": "dflash", "draft.block_size": 8},
    "dflare": {"draft.variant": "dflare", "draft.block_size": 8},
    "dspark": {
        "draft.variant": "dspark", "draft.block_size": 7, "draft.markov_head": "vanilla", "draft.confidence": True,
        "loss.ce": 0.1, "loss.l1": 0.9, "loss.confidence": 1.0,
    },
}  # fmt: skip

FAIR = {
    "features": {"last_hidden": True},
    "search": {"budget": "time", "seeds": [0, 1]},
    "train": {"seconds": 300.0},
}


def main(argv: Sequence[str] | None = None) -> int:
    sweep = cli.Sweep("compare_family", __doc__, FAIR, baseline="dflash")
    sweep.vary("--variants", "variant", VARIANTS, variant)
    return sweep.run(argv)


def variant(text: str) -> cli.Variation:
    """The name and the settings of one variant; a block size may stand behind a colon."""
    name, colon, size = text.partition(":")
    if name not in VARIANTS or colon and not size.isdecimal():
        known = ", ".join(VARIANTS)
        raise argparse.ArgumentTypeError(f"expected some of {known}, or such as dflash:16 with a size; got {text!r}")
    return text.replace(":", "_"), VARIANTS[name] | ({"draft.block_size": int(size)} if colon else {})


if __name__ == "__main__":
    cli.main(main)
