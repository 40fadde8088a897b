"""Traces in, numbers out: the only place where a metric is defined.

Pure numpy. A decoding metric pools over rounds unless its name says `macro`; an interval is a bootstrap over prompts.
What cannot be known (no round, one prompt) is NaN, never a made-up number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from draftlab.decode import Trace

CALIBRATION_BINS = 10
"""Of the expected calibration error: equal parts of [0, 1]."""


def acceptance_length(traces: Sequence[Trace]) -> float:
    """tau: committed tokens per round, the bonus token included, over all rounds of all prompts.

    The round that ends a text counts only the tokens up to and including EOS or the limit.
    """
    return ratio(acceptance_items(traces))


def acceptance_length_macro(traces: Sequence[Trace]) -> float:
    """Mean over prompts of each prompt's own committed tokens per round (the figure most papers print)."""
    return macro_statistic(acceptance_items(traces))


def acceptance_items(traces: Sequence[Trace]) -> np.ndarray:
    """(P, 2): committed tokens and rounds of each prompt; `acceptance_length` is the ratio of their sums."""
    return np.array([(sum(r.committed for r in t.rounds), len(t.rounds)) for t in traces], float).reshape(-1, 2)


def macro_statistic(items: np.ndarray) -> np.ndarray | float:
    """`acceptance_length_macro` of (..., P, 2) `acceptance_items`: the mean of the prompts' own ratios.

    Prompts without a round count for nothing.
    """
    tokens, rounds = items[..., 0], items[..., 1]
    own = np.divide(tokens, rounds, out=np.zeros(np.shape(rounds)), where=rounds > 0)
    return ratio(np.stack([own, np.minimum(rounds, 1)], axis=-1))


def conditional_acceptance(traces: Sequence[Trace], block_size: int) -> np.ndarray:
    """P(slot k is accepted | all slots before it were), over the rounds in which slot k was at stake.

    A slot is not at stake in the round that ends a text when EOS or the limit comes before it, nor where a schedule
    let it not be verified (`Round.drafted`).

    Args:
        block_size: B, the tokens that a round may commit: one more than it drafts. The traces' block size, or in the
            layout `next` one more.

    Returns:
        (B-1,) one value a drafted slot, slot 1 first; NaN where no round came that far.
    """
    passed, reached = slot_counts(traces, block_size)
    return np.divide(passed, reached, out=np.full(block_size - 1, np.nan), where=reached > 0)


def slot_counts(traces: Sequence[Trace], block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """How many rounds passed each drafted slot, and how many had it at stake with all slots before it accepted.

    Returns:
        (passed, reached), each (B-1,) int, slot 1 first.
    """
    drafted, accepted = _rounds(traces)
    slots = np.arange(1, block_size)[:, None]
    return (accepted >= slots).sum(1), ((accepted >= slots - 1) & (drafted >= slots)).sum(1)


def survival(traces: Sequence[Trace], block_size: int) -> np.ndarray:
    """P(the first k drafted tokens are all accepted), for k = 1..B-1; see `survival_curve`."""
    return survival_curve(*slot_counts(traces, block_size))


def survival_curve(passed: np.ndarray, reached: np.ndarray) -> np.ndarray:
    """P(the first k drafted tokens are all accepted), for k = 1..B-1, from counts by slot.

    The running product of the conditional acceptances (Kaplan-Meier), so that the rounds which end a text count as far
    as they went; without such rounds it is the plain share of rounds with at least k accepted tokens. NaN is unknown.
    Under a schedule late slots are verified where they are likely, and the curve lies above that of whole blocks.

    Args:
        passed, reached: (B-1,) as in `slot_counts`; additive over batches and workers.
    """
    result, alive = np.empty(len(passed)), 1.0
    for k, (through, tried) in enumerate(zip(passed, reached, strict=True)):
        # once nothing survives, an unreached slot is 0, not unknown
        alive = 0.0 if not alive else alive * through / tried if tried else np.nan
        result[k] = alive
    return result


def full_block_fraction(traces: Sequence[Trace], block_size: int) -> float:
    """P(all B-1 drafted tokens are accepted): the last slot's survival."""
    return float(survival(traces, block_size)[-1])


def first_failure(traces: Sequence[Trace], block_size: int) -> np.ndarray:
    """How many rounds failed first at slot 1, 2, .., B-1, and last how many accepted the whole block.

    Returns:
        (B,) int. Rounds that ended a text, or verified less than the block, without a failure are in no bin.
    """
    drafted, accepted = _rounds(traces)
    failed = accepted[accepted < drafted]
    whole = (accepted == block_size - 1).sum()
    return np.append(np.bincount(failed, minlength=block_size - 1), whole)


def speedup(target_traces: Sequence[Trace], draft_traces: Sequence[Trace], end_to_end: bool = False) -> float:
    """The target's own decoding time per output token over the speculative one.

    Args:
        target_traces, draft_traces: the same prompts in the same order, decoded in the same process.
        end_to_end: with the prefill (and its token); else decoding only, from the first token on.
    """
    return speedup_statistic(speedup_items(target_traces, draft_traces, end_to_end))


def speedup_items(
    target_traces: Sequence[Trace], draft_traces: Sequence[Trace], end_to_end: bool = False
) -> np.ndarray:
    """(P, 4): seconds and tokens of the target alone, seconds and tokens of speculative decoding."""
    if len(target_traces) != len(draft_traces):
        raise ValueError(f"expected one target trace a draft trace, got {len(target_traces)} and {len(draft_traces)}")
    pairs = zip(target_traces, draft_traces)
    return np.array([_cost(a, end_to_end) + _cost(b, end_to_end) for a, b in pairs], float).reshape(-1, 4)


def speedup_statistic(items: np.ndarray) -> np.ndarray | float:
    """`speedup` of (..., P, 4) items: pooled seconds per token of the target over those of the draft."""
    return ratio(items[..., :2]) / ratio(items[..., 2:])


def call_times(target_traces: Sequence[Trace], draft_traces: Sequence[Trace]) -> dict[str, float]:
    """Mean milliseconds: `target_ms` a token of the target alone; `draft_ms`, `verify_ms`, `commit_ms` a round.

    `draft_ms` holds all that the draft does, the committed features' way into its cache too, as in a published draft's
    one forward; `commit_ms` is the rest of a round: both caches cropped, bookkeeping.
    In a batch they are a row's share; a call takes `rows_per_call` times as long.
    speedup = acceptance_length * target_ms / (draft_ms + verify_ms + commit_ms) by construction.
    """
    rounds = [r for trace in draft_traces for r in trace.rounds]
    times = np.array([(r.draft_seconds, r.verify_seconds, r.commit_seconds) for r in rounds]).reshape(-1, 3)
    draft, verify, commit = times.mean(0) * 1e3 if rounds else (np.nan,) * 3
    target = ratio(np.array([_cost(trace, False) for trace in target_traces], float).reshape(-1, 2)) * 1e3
    return {"target_ms": target, "draft_ms": float(draft), "verify_ms": float(verify), "commit_ms": float(commit)}


def speedup_of_calls(acceptance_length: float, times: Mapping[str, float]) -> float:
    """tau * T_target / (T_draft + T_verify): the speedup if a round were its two forwards and nothing else.

    Args:
        times: of `call_times`; what the measured speedup lacks to this value is `commit_ms`.
    """
    return acceptance_length * times["target_ms"] / (times["draft_ms"] + times["verify_ms"])


def verified_tokens(traces: Sequence[Trace]) -> float:
    """Mean drafted tokens that a round verified with something at stake: all, less where a text ends or by schedule."""
    drafted = _rounds(traces)[0]
    return float(drafted.mean()) if len(drafted) else float("nan")


def rows_per_call(traces: Sequence[Trace]) -> float:
    """Mean rows that shared a round's calls: below the batch size, since finished rows leave."""
    rows = [r.rows for trace in traces for r in trace.rounds]
    return len(rows) / sum(1 / n for n in rows) if rows else float("nan")


def typical(repeats: Sequence[Trace]) -> Trace:
    """Of one prompt's repeats, the one with the median decoding time (the faster of the middle two)."""
    return sorted(repeats, key=lambda trace: trace.seconds)[(len(repeats) - 1) // 2]


def bootstrap(
    statistic: Callable[[np.ndarray], np.ndarray | float], items: np.ndarray, resamples: int, seed: int = 0
) -> tuple[float, float]:
    """95 % percentile interval of a statistic over prompts, and over seeds where there are several.

    Args:
        statistic: of (..., P, n) items over their prompts; `ratio` or `speedup_statistic`, say.
        items: (P, n) per-prompt sums, or (K, P, n) of drafts from K seeds on the same prompts. Put two drafts' items
            side by side to compare them paired.
        resamples: how often P prompts (and K seeds) are drawn with replacement.

    Returns:
        (low, high); NaN for fewer than two prompts, which say nothing about their spread.
    """
    seeds, prompts, _ = (items := items if items.ndim == 3 else items[None]).shape
    if prompts < 2:
        return float("nan"), float("nan")
    random = np.random.default_rng(seed)
    drawn = random.integers(prompts, size=(resamples, 1, prompts))
    drawn = items[random.integers(seeds, size=(resamples, seeds, 1)), drawn]
    values = np.asarray(statistic(drawn.reshape(resamples, seeds * prompts, -1)))
    values = values[np.isfinite(values)]  # a draw of prompts without a single round has no value
    low, high = np.percentile(values, [2.5, 97.5]) if len(values) else (np.nan, np.nan)
    return float(low), float(high)


def ratio(items: np.ndarray) -> np.ndarray | float:
    """(..., P, 2) -> sum of the first column over sum of the second; NaN where that is 0."""
    above, below = items[..., 0].sum(-1), items[..., 1].sum(-1)
    result = np.divide(above, below, out=np.full(np.shape(above), np.nan), where=below > 0)
    return float(result) if result.ndim == 0 else result


def difference(statistic: Callable[[np.ndarray], np.ndarray | float], width: int) -> Callable[[np.ndarray], np.ndarray]:
    """The statistic of two drafts' items side by side, (..., P, 2 * width): first minus second.

    `bootstrap(difference(ratio, 2), np.hstack([a, b]), ...)` is the paired interval: where it holds 0, no difference.
    """
    return lambda items: np.asarray(statistic(items[..., :width])) - np.asarray(statistic(items[..., width:]))


def offline_committed(correct: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """Tokens that a round would commit at each anchor, without decoding: the leading correct run, and the bonus token.

    The text ends, as in decoding, where a token isn't there: nothing is committed from it on, no bonus token either.

    Args:
        correct: (..., n) bool, the drafted slot's most likely token is the text's own.
        valid: (..., n + 1) bool, the slot's label, and last the token behind the block, is supervised and inside the
            sequence.

    Returns:
        (...) int; 0 where the first slot's label isn't there (no anchor).
    """
    correct, valid = np.asarray(correct, bool), np.asarray(valid, bool)
    if (*correct.shape[:-1], correct.shape[-1] + 1) != valid.shape:
        raise ValueError(f"valid must be one longer than correct, got {correct.shape} and {valid.shape}")
    run = np.logical_and.accumulate(correct, axis=-1).sum(-1)
    left = np.logical_and.accumulate(valid, axis=-1).sum(-1)
    return np.minimum(run + 1, left)


def offline_acceptance(correct: np.ndarray, valid: np.ndarray) -> tuple[int, int]:
    """(committed tokens, rounds) over all anchors, as if each began a round; additive over batches and workers.

    Arguments as in `offline_committed`. Their ratio is the offline acceptance length.
    """
    committed = offline_committed(correct, valid)
    return int(committed.sum()), int((committed > 0).sum())


def offline_slot_counts(correct: np.ndarray, valid: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`slot_counts` of all anchors, as if each began a round. Arguments as in `offline_committed`."""
    at_stake = np.cumprod(valid[..., :-1], axis=-1, dtype=int).reshape(-1, correct.shape[-1])
    through = np.cumprod(correct, axis=-1, dtype=int).reshape(at_stake.shape) * at_stake
    before = np.hstack([np.ones_like(through[:, :1]), through[:, :-1]])
    return through.sum(0), (before * at_stake).sum(0)


def serving_walk(committed: np.ndarray) -> tuple[int, int]:
    """(committed tokens, rounds) of one sequence, restarting after each accepted run as decoding does.

    Args:
        committed: (S,) `offline_committed` of a block anchored at every position; 0 where none may be.
    """
    tokens = rounds = position = 0
    while position < len(committed):
        tokens += int(committed[position])
        rounds += committed[position] > 0
        position += max(int(committed[position]), 1)  # a place without an anchor is stepped over
    return tokens, int(rounds)


def confidence_items(traces: Sequence[Trace], block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """What the confidence head said of each drafted token at stake, and what came of it.

    Returns:
        (R, B-1) its logits, NaN where a slot was not at stake (or the draft has no such head); (R, B-1) bool, were all
        drafted tokens up to this one accepted? R rounds of all prompts.
    """
    rounds = [r for trace in traces for r in trace.rounds]
    logits = np.full((len(rounds), block_size - 1), np.nan)
    for row, r in zip(logits, rounds):
        row[: len(r.confidence)] = r.confidence
    accepted = np.array([r.accepted for r in rounds], int)
    return logits, accepted[:, None] >= np.arange(1, block_size)


def confidence_scores(reached: np.ndarray, accepted: np.ndarray) -> dict[str, np.ndarray]:
    """How true the probabilities are that the first j drafted tokens are all accepted: `ece`, `auc` and `brier`.

    Args:
        reached: (R, n) the probability, `schedule.reach`; NaN where slot j was not at stake.
        accepted: (R, n) bool, as in `confidence_items`.

    Returns:
        (n + 1,) each: slot by slot, and last the mean over the slots, each weighing as many rounds as it was at stake
        in. NaN is unknown.
    """
    known, found = np.isfinite(reached), {}
    for name, score in {"ece": calibration_error, "auc": area_under_curve, "brier": brier_score}.items():
        slots = np.array([score(p[k], y[k]) for p, y, k in zip(reached.T, accepted.T, known.T)])
        weights = known.sum(0) * np.isfinite(slots)
        mean = np.average(np.nan_to_num(slots), weights=weights) if weights.any() else np.nan
        found[name] = np.append(slots, mean)
    return found


def calibration_error(probabilities: np.ndarray, outcomes: np.ndarray) -> float:
    """ECE: how far the mean probability of a bin is from the share of its outcomes that came true, over all bins.

    CALIBRATION_BINS equal bins of [0, 1], each weighing as many outcomes as it has.

    Args:
        probabilities: (R,) in [0, 1].
        outcomes: (R,) bool.
    """
    if not len(probabilities):
        return float("nan")
    bins = np.minimum((probabilities * CALIBRATION_BINS).astype(int), CALIBRATION_BINS - 1)
    excess = np.bincount(bins, probabilities - outcomes, minlength=CALIBRATION_BINS)
    return float(np.abs(excess).sum() / len(probabilities))


def area_under_curve(probabilities: np.ndarray, outcomes: np.ndarray) -> float:
    """AUC: how often something that came true had a higher probability than something that didn't; ties count half.

    Arguments as in `calibration_error`. NaN where all or none came true.
    """
    values, place, count = np.unique(probabilities, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(count) - (count - 1) / 2)[place]  # of ties the middle one
    true = int(np.sum(outcomes))
    false = len(outcomes) - true
    if not true or not false:
        return float("nan")
    return float((ranks[outcomes].sum() - true * (true + 1) / 2) / (true * false))


def brier_score(probabilities: np.ndarray, outcomes: np.ndarray) -> float:
    """Mean squared distance of the probabilities from what came true (1) or didn't (0). As `calibration_error`."""
    return float(np.mean((probabilities - outcomes) ** 2)) if len(probabilities) else float("nan")


def chi_square(observed: np.ndarray, expected: np.ndarray) -> float:
    """The p-value of counts under the distribution that they should have (Pearson's test); NaN for a single cell.

    Args:
        observed: (C,) counts.
        expected: (C,) what they should be on average. Cells below 5 count as one.
    """
    rare = expected < 5
    observed, expected = (np.append(cells[~rare], cells[rare].sum()) for cells in (observed, expected))
    if expected[-1] == 0:
        if observed[-1]:
            return 0.0  # what can't happen did
        observed, expected = observed[:-1], expected[:-1]
    return _upper_tail(float(((observed - expected) ** 2 / expected).sum()), len(expected) - 1)


def two_samples(first: np.ndarray, second: np.ndarray) -> float:
    """The p-value of two samples' counts, each (C,), under one common distribution; NaN for a single cell."""
    both = np.stack([first, second])
    rare = both.sum(0) < 10
    both = np.hstack([both[:, ~rare], both[:, rare].sum(1, keepdims=True)])
    both = both[:, both.sum(0) > 0]
    expected = both.sum(1, keepdims=True) * both.sum(0) / both.sum()
    return _upper_tail(float(((both - expected) ** 2 / expected).sum()), both.shape[1] - 1)


def _upper_tail(statistic: float, freedom: int) -> float:
    """P(chi-square >= statistic), by Wilson and Hilferty's cube root: within 3% at .01, 17% at .001."""
    if not freedom:
        return float("nan")
    spread = 2 / (9 * freedom)
    return 0.5 * math.erfc(((statistic / freedom) ** (1 / 3) - 1 + spread) / math.sqrt(2 * spread))


def _rounds(traces: Sequence[Trace]) -> tuple[np.ndarray, np.ndarray]:
    """Slots at stake and accepted tokens of every round, both (R,) int."""
    rounds = [(r.drafted, r.accepted) for trace in traces for r in trace.rounds]
    return tuple(np.array(rounds, int).reshape(-1, 2).T)


def _cost(trace: Trace, end_to_end: bool) -> tuple[float, int]:
    """(seconds, tokens); the prefill's token belongs to the prefill."""
    if end_to_end:
        return trace.prefill_seconds + trace.seconds, len(trace.tokens)
    return trace.seconds, len(trace.tokens) - 1
