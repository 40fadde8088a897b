"""What a draft's confidence is good for: calibrated, it says how many drafted tokens are worth verifying. Pure numpy.

Shapes: R rounds or N rows, n drafted tokens. c_j is the confidence that drafted token j is accepted if all before it
are, a_j = c_1 .. c_j that the first j all are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from draftlab import metrics

TEMPERATURES = 10.0 ** np.linspace(-1, 1, 201)
"""What a calibration chooses from; 1, which changes nothing, is one of them."""


def reach(logits: np.ndarray, temperatures: Sequence[float] | None = None) -> np.ndarray:
    """a_j: how likely the first j drafted tokens are all accepted, by the confidence head.

    Args:
        logits: (..., n) of the confidence head; NaN stays NaN.
        temperatures: by which each slot's logit is divided, the last one for further slots too; None is 1.

    Returns:
        (..., n) float64.
    """
    logits = np.asarray(logits, float)
    if temperatures is not None:
        slots = np.arange(logits.shape[-1])
        logits = logits / np.asarray(temperatures)[np.minimum(slots, len(temperatures) - 1)]
    return np.cumprod(0.5 * (1 + np.tanh(logits / 2)), axis=-1)


def fit_temperatures(logits: np.ndarray, accepted: np.ndarray) -> list[float]:
    """One temperature a slot, from the first to the last: with which a_j is calibrated best, given those before.

    Args:
        logits: (R, n) of the confidence head, as `metrics.confidence_items` gives them.
        accepted: (R, n) bool, were the first j all accepted?

    Returns:
        n temperatures; 1 where no round came that far.

    Source: the DSpark paper, sequential temperature scaling.
    """
    found: list[float] = []
    for slot in range(logits.shape[1]):
        known = np.isfinite(logits[:, slot])
        if not known.any():
            found.append(1.0)
            continue
        before = reach(logits[known, :slot], found)[:, -1] if slot else 1.0
        errors = [
            metrics.calibration_error(before * reach(logits[known, slot : slot + 1], [t])[:, 0], accepted[known, slot])
            for t in TEMPERATURES
        ]
        best = np.flatnonzero(np.isclose(errors, min(errors), rtol=0, atol=1e-12))
        found.append(float(TEMPERATURES[min(best, key=lambda i: abs(i - len(TEMPERATURES) // 2))]))
    return found


def verified_length(reached: np.ndarray, stake: np.ndarray, seconds: Sequence[float]) -> int:
    """How many drafted tokens of every row one call should verify, for the most expected tokens per second.

    Slots are admitted one by one while the expectation does not fall, and the first that lowers it ends the block. So
    whether slot j is verified hangs on a_1 .. a_j, which know the drafted tokens before it, and on nothing later: a
    maximum over all lengths would ask the confidence of later slots, which know what was drafted at j, and so would
    prefer some tokens over others.

    Args:
        reached: (N, n) a_j of each row.
        stake: (N,) how many of its drafted tokens a row can commit.
        seconds: (n + 1,) or more, of a round that verifies 0, 1, .. n of them.

    Source: the DSpark paper, algorithm 1; here the rows of a call share one length, since they share one forward, in
    which a shorter row would save nothing.
    """
    gains = (reached * (np.arange(reached.shape[1]) < stake[:, None])).sum(0)
    tokens = float(len(reached))  # each row's bonus token
    for length, gain in enumerate(gains):
        if (tokens + gain) / seconds[length + 1] < tokens / seconds[length]:
            return length
        tokens += gain
    return len(gains)


@dataclass(frozen=True)
class Schedule:
    """Verified lengths by the draft's confidence, on a machine where rounds cost what was measured."""

    seconds: Mapping[int, Sequence[float]]
    """Rows of a call -> (n + 1,) seconds of a round that verifies 0, 1, .. n drafted tokens of each row."""

    def length(self, reached: np.ndarray, stake: Sequence[int]) -> int:
        """The `verified_length` of a call; between measured numbers of rows on a straight line."""
        known = sorted(self.seconds)
        columns = zip(*(self.seconds[rows] for rows in known))
        costs = [float(np.interp(len(reached), known, column)) for column in columns]
        return verified_length(reached, np.asarray(stake), costs)
