"""Question: how good is the draft of one configuration?

Varies: nothing; a sweep of one trial.
Run:    python experiments/train.py train.steps=2000 draft.block_size=16
        python experiments/train.py --resume outputs/train/20260101T000000Z
Writes: the draft in trials/draft/draft, its evaluation, results.csv and figures under --out
    (default outputs/train/<UTC time>); a parent run in MLflow with one child.
Cost:   the default takes 7 minutes on two CPU cores.
Source: arXiv:2602.06036.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from draftlab import cli, config
from draftlab.errors import UserError


def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.run_parser(__doc__)
    parser.add_argument("--out", type=Path, help="the run's folder; must not exist yet")
    parser.add_argument("--resume", type=Path, metavar="FOLDER", help="go on with an interrupted run")
    args = parser.parse_args(argv)
    if args.resume and (args.out or args.overrides):
        raise UserError("--resume takes everything from the folder; expected no --out and no overrides")
    with cli.Progress("loading torch, Ray and MLflow") as say:
        if args.resume:
            say(f"going on with {args.resume}")
            from draftlab import sweep  # slow: after the first line is out

            return sweep.resume(args.resume, say)
        base = config.load(args.config, args.overrides)
        say(f"a draft of block size {base.draft.block_size} for {base.target.model}")
        from draftlab import sweep

        return sweep.start("train", base, {}, args.out, say)


if __name__ == "__main__":
    cli.main(main)
