"""The speed surface: what the calls of a round cost by block size, batch and context, and the speed that follows.

A round at block size b commits 1 + S(1) + .. + S(b-1) tokens (to S(b) in the layout `next`), S being the survival
curve. With the cost of its calls this predicts the speed at every b without decoding at any. And it tells a schedule
what a round costs by its verified length.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from draftlab import metrics
from draftlab.decode import Sampling, Trace, decode_speculative, decode_target
from draftlab.draft import Draft
from draftlab.schedule import Schedule
from draftlab.target import Target

ROUNDS = 16
"""Rounds behind each of a cell's two timings; the first are warm-up."""
WARM_UP_ROUNDS = 2


def most_tokens(block_size: int) -> int:
    """New tokens that the timing of a block size may take."""
    return block_size + ROUNDS * (block_size + 1)


@dataclass(frozen=True)
class Surface:
    """Mean seconds of a call, all rows of the batch together."""

    context: int
    """Tokens before a round of `rounds`."""
    rounds: dict[tuple[int, int], tuple[float, float, float]]
    """(block size, batch) -> seconds of the draft's call, of the verification, of the rest of a round."""
    target: dict[tuple[int, int], float]
    """(batch, context) -> seconds of the target's call for one token a row."""
    first_slot: int = 1
    """The draft's first drafted slot: a block of b tokens drafts b - first_slot."""

    def round_seconds(self, block_size: int, batch: int) -> float:
        """Seconds of a round; between measured block sizes on a straight line."""
        known = sorted((size, sum(parts)) for (size, of), parts in self.rounds.items() if of == batch)
        return float(np.interp(block_size, *zip(*known)))

    def seconds_by_length(self, block_size: int, batch: int) -> list[float]:
        """Seconds of a round that drafts blocks of a measured size, and verifies 0, 1, .. all of what it drafts.

        A straight line through all measured lengths, of which 0 costs the target's call for one token: the noise of a
        single one ends no block early, and where each token costs alike the first fall of the expected speed is the
        last, so that a schedule loses nothing by stopping there. More is never cheaper.
        """
        draft, _, _ = self.rounds[block_size, batch]
        known = {size - self.first_slot: sum(parts[1:]) for (size, of), parts in self.rounds.items() if of == batch}
        lengths, seconds = map(np.array, zip(*{0: self.target_seconds(batch), **known}.items()))
        slope = max(0.0, float(np.polyfit(lengths, seconds, 1)[0]))
        start = draft + seconds.mean() - slope * lengths.mean()
        return [float(start + slope * length) for length in range(block_size - self.first_slot + 1)]

    def target_seconds(self, batch: int, context: int | None = None) -> float:
        """Seconds of the target's call; between measured context lengths on a straight line."""
        known = sorted((length, seconds) for (of, length), seconds in self.target.items() if of == batch)
        return float(np.interp(self.context if context is None else context, *zip(*known)))


def measure(
    target: Target,
    draft: Draft,
    texts: Sequence[Sequence[int]],
    block_sizes: Sequence[int],
    batches: Sequence[int],
    contexts: Sequence[int],
    say: Callable[..., None],
    sampling: Sampling = Sampling(),
) -> Surface:
    """Time the calls of a few rounds in every cell, as decoding makes them, there and back so that drift evens out.

    A pass before warms up, and tells how many tokens the draft's rounds commit: a good draft is given longer texts, so
    that its rounds are as many, and whole.

    Args:
        texts: token ids, repeated or cut to the context's length.
        contexts: lengths at which the target alone is timed; rounds are timed at the middle one.
        sampling: how tokens are chosen, which takes its time, too.
    """
    target = copy.copy(target)
    target.eos_token_ids = frozenset()  # calls are timed; the texts don't matter and should not end
    middle = sorted(contexts)[len(contexts) // 2]
    rounds: dict[tuple[int, int], list[tuple[float, float, float]]] = {}
    alone: dict[tuple[int, int], list[float]] = {}
    for batch in batches:
        there = [*(("alone", context) for context in contexts), *(("rounds", size) for size in block_sizes)]
        pace: dict[int, float] = {}
        for kind, value in there + there + there[::-1]:
            if kind == "alone":
                traces = decode_target(target, _prompts(texts, batch, value), ROUNDS, sampling)
                steps = max(len(trace.tokens) for trace in traces) - 1
                spent = sum(trace.seconds for trace in traces) / max(steps, 1)
                alone.setdefault((batch, value), []).append(spent)
            else:
                limit = value + round(ROUNDS * pace.get(value, 1.0))
                traces = decode_speculative(target, draft, _prompts(texts, batch, middle), limit, value, sampling)
                if value in pace:
                    found = _whole_rounds(traces, value - draft.spec.first_slot, batch)
                    rounds.setdefault((value, batch), []).extend(found)
                pace.setdefault(value, metrics.acceptance_length(traces))
        say(f"timed batch {batch} at block sizes {', '.join(map(str, block_sizes))}", doing="timing calls")
    return Surface(
        middle,
        {cell: tuple(np.mean(seconds, axis=0).tolist()) for cell, seconds in rounds.items()},
        {cell: float(np.mean(seconds[1:])) for cell, seconds in alone.items()},
        draft.spec.first_slot,
    )


def schedule(
    target: Target,
    draft: Draft,
    texts: Sequence[Sequence[int]],
    block_size: int,
    batch: int,
    say: Callable[..., None],
    sampling: Sampling = Sampling(),
) -> Schedule:
    """The schedule of a draft's rounds, by what they cost here and now.

    Args:
        texts: token ids; rounds are timed behind as many tokens as the middle one has.
        block_size: that is decoded with.
        batch: most rows of a call; timed are this and 1.
        sampling: how tokens will be chosen.
    """
    room = min(target.max_positions, draft.spec.max_position_embeddings) - most_tokens(block_size)
    context = max(1, min(sorted(map(len, texts))[len(texts) // 2], room))
    sizes, batches = sorted({2, (2 + block_size) // 2, block_size}), sorted({1, batch})
    found = measure(target, draft, texts, sizes, batches, [context], say, sampling)
    return Schedule({rows: found.seconds_by_length(block_size, rows) for rows in batches})


def _prompts(texts: Sequence[Sequence[int]], batch: int, length: int) -> list[list[int]]:
    """Texts repeated or cut to a length, each a token shorter than the one before: rows of a batch differ in length."""
    rows = [list(texts[row % len(texts)]) for row in range(batch)]
    return [(ids * -(-length // len(ids)))[: max(1, length - row)] for row, ids in enumerate(rows)]


def _whole_rounds(traces: Sequence[Trace], drafted: int, batch: int) -> list[tuple[float, float, float]]:
    """Seconds of the calls of rounds with whole blocks of the whole batch; of any round where texts end too early."""
    every = [r for trace in traces for r in trace.rounds]
    later = [r for trace in traces for r in trace.rounds[WARM_UP_ROUNDS:]]
    whole = [r for r in later if r.drafted == drafted and r.rows == batch] or later or every
    return [(r.draft_seconds * r.rows, r.verify_seconds * r.rows, r.commit_seconds * r.rows) for r in whole]


def predict(
    surface: Surface, survival: Sequence[float], batch: int, context: int | None = None
) -> list[dict[str, Any]]:
    """The speed at every block size from the smallest measured to the survival curve's.

    Args:
        survival: S(k), k = 1.., as `metrics.survival`; what was never reached counts as 0.
        context: tokens before the round; None is the surface's own.

    Returns:
        A row a block size b: `acceptance_length`, `tokens_per_second` of the whole batch, `speedup` over the target's
        own decoding of that batch, `break_even` (the tokens per round at which the speedup is 1), `slot_gain` (what the
        last slot adds to the speedup: it pays where that is above 0), `drafted_tokens` of a block.
    """
    alone = surface.target_seconds(batch, context)
    smallest = min(size for size, of in surface.rounds if of == batch)
    first = surface.first_slot
    rows, before = [], 1.0 if smallest - first == 1 else np.nan  # without a drafted token: the target alone
    for size in range(smallest, len(survival) + first + 1):
        length = 1 + float(np.nansum(survival[: size - first]))
        seconds = surface.round_seconds(size, batch)
        speedup = length * alone / seconds
        rows.append({
            "block_size": size, "batch_size": batch, "acceptance_length": length,
            "tokens_per_second": batch * length / seconds, "speedup": speedup,
            "break_even": seconds / alone, "slot_gain": speedup - before, "drafted_tokens": size - first,
        })  # fmt: skip
        before = speedup
    return rows


def best(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The row of the fastest block size; its last slot is the last that pays."""
    return max(rows, key=lambda row: row["speedup"])


def best_by_group(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The `best` row of each domain and batch size."""
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["domain"], row["batch_size"]), []).append(row)
    return [best(some) for some in groups.values()]


def against_measurement(rows: Sequence[dict[str, Any]], measured: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Predicted rows beside measured ones of the same block size.

    Args:
        measured: rows with `block_size`, `acceptance_length`, `speedup`, `speedup_low` and `speedup_high`.

    Returns:
        A row a measured block size; `error` is the predicted speedup over the measured one, minus 1.
    """
    predicted = {row["block_size"]: row for row in rows}
    result = []
    for row in measured:
        if row["block_size"] in predicted:
            ours = predicted[row["block_size"]]
            result.append({
                "block_size": row["block_size"],
                "predicted_acceptance_length": ours["acceptance_length"],
                "measured_acceptance_length": row["acceptance_length"],
                "predicted_speedup": ours["speedup"],
                "measured_speedup": row["speedup"],
                "measured_speedup_low": row["speedup_low"],
                "measured_speedup_high": row["speedup_high"],
                "error": ours["speedup"] / row["speedup"] - 1,
            })  # fmt: skip
    return result


def agrees(compared: Sequence[dict[str, Any]]) -> bool:
    """Is the predicted best block size the measured best, or did it measure within the interval of that?"""
    predicted = max(compared, key=lambda row: row["predicted_speedup"])
    measured = max(compared, key=lambda row: row["measured_speedup"])
    return predicted is measured or predicted["measured_speedup"] >= measured["measured_speedup_low"]
