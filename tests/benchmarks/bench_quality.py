"""How soon does a draft of the default recipe accept as much as one of the published recipe ever does?

Both train drafts with blocks of 8 on the same conversations with all cores, and the same held-out conversations score
both. The published recipe is the plain script of bench_train.py with the target in its loop: random weights, the whole
vocabulary, a learning rate of 6e-4 (arXiv:2602.06036), but steps of a size for two cores, 4 sequences x 32 anchors. It
has --seconds to train; the default recipe has a third of that, and what it needs to store the target's states first is
told beside it. Scoring is in neither's time.

Run:    python tests/benchmarks/bench_quality.py
        python tests/benchmarks/bench_quality.py --seconds 240 --seeds 0
Writes: curves.csv and curves.png into --out (default outputs/bench_quality).
Cost:   an hour and ten minutes on two CPU cores: 20 minutes a seed, and the features.
Exit:   1 when a seed's draft did not get there in a third of the time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from bench_train import Plain
from matplotlib.figure import Figure
from measuring import Steps, now, own_cache, parser, start

from draftlab import cli, report, train
from draftlab.target import load_target

PUBLISHED = {
    "draft.vocab": None, "draft.init": "random", "draft.attention": "dense",
    "train.lr": 6e-4, "train.warmup": 0.04, "train.beta2": 0.999, "train.batch_size": 4, "train.anchors": 32,
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--seconds", type=float, default=900.0, help="of training by the published recipe")
    options.add_argument("--seeds", type=cli.integers, default=[0, 1, 2], metavar="N,N,...")
    options.add_argument("--points", type=int, default=9, help="of a curve")
    options.add_argument("--out", type=Path, default=Path("outputs/bench_quality"), help="folder of the curves")
    args = options.parse_args(argv)
    base = start(args, ["draft.block_size=8"])
    if base is None:
        return 0
    target = load_target(base.target)
    with own_cache(), cli.Progress("preparing") as say:
        began = now()
        prepared = train.prepare({"draftlab": base}, say)
        stored = now() - began
        say(f"features stored in {stored:.0f} s")

        def trained(recipe: str, seed: int, seconds: float) -> list[tuple[float, float]]:
            settings = PUBLISHED if recipe == "published" else {}
            run = base.replace({**settings, "seed": seed, "train.seconds": seconds})
            step = Steps(run, prepared, target)
            loop = step.loop
            if recipe == "published":
                step = Plain(run, prepared, target, in_the_loop=True)
                loop.draft = step.draft
            return curve(step, loop._evaluate, seconds, args.points, functools.partial(say_point, say, recipe, seed))

        rows, reached = [], []
        for seed in args.seeds:
            published, ours = trained("published", seed, args.seconds), trained("draftlab", seed, args.seconds / 3)
            for recipe, points in (("published", published), ("draftlab", ours)):
                rows += [{"recipe": recipe, "seed": seed, "seconds": s, "acceptance_length": a} for s, a in points]
            aim = max(length for _, length in published)
            reached.append(first(ours, aim))
            outcome = told_of(reached[-1], args.seconds, stored)
            say(f"seed {seed}: the published recipe gets to {aim:.2f}; draftlab {outcome}")
    frame = pd.DataFrame(rows)
    args.out.mkdir(parents=True, exist_ok=True)
    frame.to_csv(args.out / "curves.csv", index=False)
    with matplotlib.rc_context(report.STYLE):
        picture(frame).savefig(args.out / "curves.png")
    print(frame.pivot_table(index=["recipe", "seed"], values="acceptance_length", aggfunc=["last", "max"]).round(3))
    print(f"curves: {args.out / 'curves.png'}")
    return int(any(seconds is None for seconds in reached))


def curve(
    step: Callable[[], tuple[int, float]],
    score: Callable[[], dict[str, float]],
    seconds: float,
    points: int,
    tell: Callable[[float, float], None],
) -> list[tuple[float, float]]:
    """(seconds trained, held-out acceptance length), from no training to its end."""
    found, spent = [], 0.0
    for due in np.linspace(0, seconds, points + 1):
        while spent < due:
            spent += step()[1]
        found.append((spent, score()["heldout_acceptance_length"]))
        tell(*found[-1])
    return found


def say_point(say: Callable[..., None], recipe: str, seed: int, seconds: float, length: float) -> None:
    """A line for a point of a curve."""
    say(f"{recipe}, seed {seed}: {seconds:.0f} s, acceptance length {length:.2f}", doing="training")


def first(curve: Sequence[tuple[float, float]], aim: float) -> float | None:
    """The seconds at which a curve is first at `aim` or above; None where it never is."""
    return next((seconds for seconds, length in curve if length >= aim), None)


def told_of(seconds: float | None, whole: float, stored: float) -> str:
    """In words, when that was."""
    if seconds is None:
        return "did not get there"
    return (
        f"is there after {seconds:.0f} s, {seconds / whole:.0%} of {whole:.0f}; "
        f"with the features {seconds + stored:.0f} s, {(seconds + stored) / whole:.0%}"
    )


def picture(frame: pd.DataFrame) -> Figure:
    """The curves of all seeds."""
    figure = Figure(figsize=(6.4, 3.8))
    axis = figure.subplots()
    for recipe, color in (("published", report.FADED), ("draftlab", report.INK)):
        for number, (_, one) in enumerate(frame[frame["recipe"] == recipe].groupby("seed")):
            label = None if number else recipe
            axis.plot(one["seconds"], one["acceptance_length"], color=color, marker="o", markersize=3, label=label)
    axis.set(xlabel="seconds of training", ylabel="held-out acceptance length", title="Time to quality, a line a seed")
    axis.legend()
    return figure


if __name__ == "__main__":
    cli.main(main)
