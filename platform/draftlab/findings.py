"""What was found: each arm against the baseline, paired over prompts and seeds; a sweep's one-page report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from draftlab import evaluation, metrics
from draftlab.evaluation import Pair


@dataclass(frozen=True)
class Verdict:
    """One arm against the baseline; the trials of an arm differ in their seed alone."""

    measure: str
    """What is compared, one of evaluation.MEASURES."""
    arm: str
    seeds: int
    value: float
    """Over all prompts and seeds."""
    low: float
    high: float
    difference: float
    """The arm's value less the baseline's; its 95% interval is paired by prompt and seed."""
    difference_low: float
    difference_high: float
    verdict: str
    """better, worse, no difference (the interval holds 0), unknown; `baseline` is the baseline itself."""


ONE_SEED = "With one seed the noise is that of the prompts alone; another training of the same may differ by more."


def verdicts(
    arms: Mapping[str, Mapping[int, Sequence[Pair]]], measure: str, baseline: str | None, resamples: int, seed: int
) -> list[Verdict]:
    """Each arm against the baseline, the best first.

    Args:
        arms: arm -> seed -> the decoded pairs of its draft.
        measure: one of evaluation.MEASURES.
        baseline: an arm; None, or one that has no result, is the best.
    """
    items_of, statistic = evaluation.MEASURES[measure]
    decoded = {arm: {one: pairs for one, pairs in seeds.items() if pairs} for arm, seeds in arms.items()}
    arms = {arm: seeds for arm, seeds in decoded.items() if seeds}

    def items(arm: str, seeds: Sequence[int], cases: Sequence[tuple[int, int]]) -> np.ndarray:
        """(seeds, prompts, n)"""
        by_case = [{_case(pair): pair for pair in arms[arm][one]} for one in seeds]
        several = [[pairs[case] for case in cases] for pairs in by_case] or [[]]
        return np.stack([evaluation.by_prompt(pairs, items_of(pairs)) for pairs in several])

    def pooled(items: np.ndarray) -> float:
        return float(statistic(items.reshape(-1, items.shape[-1])))

    def shared(*names: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Seeds and cases that all of these arms have."""
        seeds = sorted(set.intersection(*(set(arms[name]) for name in names)))
        cases = [{_case(pair) for pair in arms[name][one]} for name in names for one in seeds]
        return seeds, sorted(set.intersection(*cases)) if cases else []

    own = {arm: items(arm, *shared(arm)) for arm in arms}
    own = {arm: values for arm, values in own.items() if values.shape[1]}
    if not own:
        return []
    seeds, cases = shared(*own)  # what all have, where there is such: equal for all
    ranked = {arm: items(arm, seeds, cases) for arm in own} if cases else own
    order = sorted(own, key=lambda arm: -pooled(ranked[arm]))
    reference = baseline if baseline in own else order[0]
    found = []
    for arm in order:
        both = np.concatenate([items(name, *shared(arm, reference)) for name in (arm, reference)], axis=-1)
        difference = metrics.difference(statistic, both.shape[-1] // 2)
        low, high = metrics.bootstrap(difference, both, resamples, seed)
        word = "baseline" if arm == reference else _word(low, high)
        found.append(
            Verdict(
                measure, arm, len(arms[arm]),
                pooled(own[arm]), *metrics.bootstrap(statistic, own[arm], resamples, seed),
                float(difference(both.reshape(-1, both.shape[-1]))), low, high, word,
            )
        )  # fmt: skip
    return found


def _word(low: float, high: float) -> str:
    """What the interval of a difference from the baseline says."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return "unknown"
    return "better" if low > 0 else "worse" if high < 0 else "no difference"


def _case(pair: Pair) -> tuple[int, int]:
    return pair.case.prompt, pair.case.turn


def answer(found: Sequence[Verdict], measure: str) -> str:
    """The sentence that answers a sweep's question, by the measure that its trials are ranked by."""
    words = measure.replace("_", " ")
    if not found:
        return f"No trial was measured, so there is no answer by {words}."
    best, baseline = found[0], next(one for one in found if one.verdict == "baseline")
    text = f"By {words}, {best.arm} is first with {best.value:.2f} [{best.low:.2f}, {best.high:.2f}]"
    if best is baseline:
        equal = [one.arm for one in found if one.verdict not in ("worse", "baseline")]
        if len(found) == 1:
            return f"{text}; it is the only one that was measured."
        if equal:
            text = f"{text}, but it is not told apart from {', '.join(equal)}."
        else:
            text = f"{text}, and every other that was measured is worse beyond the noise."
    else:
        text = f"{text}; against the baseline {baseline.arm} that is {change(best)}: {best.verdict}."
    return text if min(one.seeds for one in found) > 1 else f"{text} {ONE_SEED}"


def proposal(arm: str, layers: Sequence[int], found: Sequence[Verdict]) -> str:
    """What became of the layers that a gate proposed.

    Args:
        arm: whose trials were trained with them.
    """
    text = f"The gate proposes layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))} ({arm})"
    one = next((one for one in found if one.arm == arm), None)
    if one is None:
        return f"{text}; nothing was measured with them."
    if one.verdict == "baseline":
        return f"{text}, which the others are compared with."
    baseline = next(one for one in found if one.verdict == "baseline")
    return f"{text}; against {baseline.arm} that is {change(one)}: {one.verdict}."


def change(one: Verdict) -> str:
    """The difference from the baseline and its interval, as text."""
    return f"{one.difference:+.2f} [{one.difference_low:+.2f}, {one.difference_high:+.2f}]"


def page(title: str, question: str, sentence: str, found: Sequence[Verdict], table: str, figures: Sequence[str]) -> str:
    """The one-page report, in Markdown.

    Args:
        title: the sweep's name.
        table: all trials, as text.
        figures: file names, beside the page.
    """
    lines = [f"# {title}", "", f"**{question}** {sentence}", ""]
    if found:
        lines += ["| arm | seeds | value | against the baseline | verdict |", "|---|---|---|---|---|"]
        lines += [
            f"| {one.arm} | {one.seeds} | {one.value:.3f} [{one.low:.3f}, {one.high:.3f}] | {one.difference:+.3f} "
            f"[{one.difference_low:+.3f}, {one.difference_high:+.3f}] | {one.verdict} |"
            for one in found
        ]
        over = "prompts and seeds" if max(one.seeds for one in found) > 1 else "prompts"
        lines += ["", f"Intervals are 95%, by bootstrap over {over}, differences paired.", ""]
    return "\n".join([*lines, "```", table, "```", "", *(f"![{name}]({name})" for name in figures), ""])


def frame(found: Sequence[Verdict]) -> pd.DataFrame:
    """The verdicts as a table."""
    return pd.DataFrame([vars(one) for one in found])
