"""What does a sweep cost beside as many separate runs that compute the target's states in their own loop?

The sweep is `experiments/sweep_decay.py` with --trials values of the loss decay; the separate runs are
`experiments/train.py` with features.mode=online, one after another, each with both cores. The same data, steps and
decoding; each side starts with no stored features, and both are timed from start to exit.

Run:    python tests/benchmarks/bench_sweep.py
        python tests/benchmarks/bench_sweep.py --trials 4 --separate 2 train.steps=50
Cost:   half an hour for the default on two CPU cores. With --separate fewer than --trials are run, spread over the
    values, and their mean stands for the others.
Exit:   1 when the sweep takes over 35% of the separate runs.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from measuring import own_cache

from draftlab import cli, config
from draftlab.errors import UserError
from draftlab.target import load_target

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"
ALLOWED = 0.35


def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.run_parser(__doc__)
    parser.add_argument("--trials", type=int, default=16, help="of the sweep")
    parser.add_argument("--separate", type=int, default=4, help="separate runs that are timed")
    args = parser.parse_args(argv)
    if not 1 <= args.separate <= args.trials:
        parser.error(f"--separate: expected 1 to {args.trials}, the trials, got {args.separate}")
    small = ["corpus.conversations=300", "train.steps=30", "eval.prompts=2", "eval.max_new_tokens=16"]
    common = ["--config", str(args.config.resolve()), *small, *args.overrides]
    load_target(config.load(args.config, args.overrides).target)  # fetched and converted before anything is timed
    gammas = [str(1 + number) for number in range(args.trials)]

    sweep = seconds("sweep_decay.py", "--decays", ",".join(gammas), *common)
    print(f"sweep of {args.trials} trials: {sweep:.0f} s", flush=True)
    separate = []
    for gamma in gammas[:: max(1, args.trials // args.separate)][: args.separate]:
        separate.append(seconds("train.py", f"loss.gamma={gamma}", "features.mode=online", *common))
        print(f"separate run, gamma {gamma}: {separate[-1]:.0f} s", flush=True)
    whole = args.trials * sum(separate) / len(separate)
    print(f"{args.trials} separate runs: {whole:.0f} s{'' if len(separate) == args.trials else ' (by their mean)'}")
    print(f"the sweep takes {sweep / whole:.1%} of them")
    return int(sweep / whole > ALLOWED)


def seconds(script: str, *arguments: str) -> float:
    """How long a script takes, with no stored features."""
    with own_cache() as folder:
        command = [sys.executable, str(EXPERIMENTS / script), *arguments, "--out", f"{folder}/out"]
        began = time.monotonic()
        if code := subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL).returncode:
            raise UserError(f"{script}: ended with exit code {code}")
        return time.monotonic() - began


if __name__ == "__main__":
    cli.main(main)
