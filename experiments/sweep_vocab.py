"""Question: how much of the target's vocabulary should a draft be able to guess?

Varies: draft.vocab (--vocabs), the most frequent tokens of the answers to train on; full is all of the target's. What
    the target writes is the same with any: a token that a draft can't guess ends its round. results.csv tells the share
    of the held-out answers' tokens that each can guess (heldout_vocab_coverage), beside training and draft times.
Run:    python experiments/sweep_vocab.py --seeds 0,1
        python experiments/sweep_vocab.py --config configs/tiny.yaml --vocabs 32,full
Writes: as sweep_block_size.py, under outputs/sweep_vocab/<UTC time>.
Cost:   as one train.py for each vocabulary and seed; --dry-run tells.
Source: EAGLE-3's released drafts have reduced vocabularies (their d2t and t2d); none is published for DFlash.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from draftlab import cli

VOCABS = ("2048", "8192", "full")


def main(argv: Sequence[str] | None = None) -> int:
    sweep = cli.Sweep("sweep_vocab", __doc__, baseline="full")
    sweep.vary("--vocabs", "vocab", dict(map(vocab, VOCABS)), vocab)
    return sweep.run(argv)


def vocab(text: str) -> cli.Variation:
    """The name and the settings of one vocabulary."""
    if text != "full" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected numbers of tokens or full, got {text!r}")
    return text if text == "full" else f"vocab_{text}", {"draft.vocab": None if text == "full" else int(text)}


if __name__ == "__main__":
    cli.main(main)
