"""Question: how good is the draft of one configuration?

Varies: nothing; a sweep of one trial.
Run:    python experiments/train.py train.steps=2000 draft.block_size=16
        python experiments/train.py --resume outputs/train/20260101T000000Z
Writes: the draft in trials/draft/draft, its evaluation, results.csv and figures under --out
    (default outputs/train/<UTC time>); a parent run in MLflow with one child.
Cost:   the default (block size 16) takes about 17 minutes on two CPU cores.
Source: arXiv:2602.06036.
"""

from __future__ import annotations

from collections.abc import Sequence

from draftlab import cli


def main(argv: Sequence[str] | None = None) -> int:
    return cli.Sweep("train", __doc__).run(argv)


if __name__ == "__main__":
    cli.main(main)
