"""Calibration and verified lengths: against plain loops, and the exact distribution of what a schedule lets through."""

import itertools
import math
import random

import numpy as np
import pytest

from draftlab import metrics, schedule
from draftlab.schedule import Schedule, fit_temperatures, reach, verified_length

# ---- running products and temperatures


def sigmoid(x):
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


@pytest.mark.parametrize("temperatures", [None, [0.5, 2.0, 3.0, 1.0], [2.0], [0.5, 2.0]])
def test_reach_is_the_running_product_of_the_confidences(temperatures):
    logits = np.random.default_rng(0).normal(0, 5, (20, 4))
    for row, found in zip(logits, reach(logits, temperatures)):
        product = 1.0
        for slot, logit in enumerate(row):
            by = 1.0 if temperatures is None else temperatures[min(slot, len(temperatures) - 1)]
            product *= sigmoid(logit / by)
            assert found[slot] == pytest.approx(product, rel=1e-12)


def test_reach_bears_extreme_logits_unknown_ones_and_none_at_all():
    assert reach(np.array([[800.0, -800.0, 0.0]])).tolist() == [[1.0, 0.0, 0.0]]
    np.testing.assert_equal(reach(np.array([[0.0, math.nan]]), [1.0, 2.0]), [[0.5, math.nan]])
    assert reach(np.empty((3, 0)), [2.0]).shape == (3, 0)


def rounds(temperatures, count=4000, seed=0):
    """Logits of a head that is wrong by these temperatures, and outcomes of what it should have said."""
    random_ = np.random.default_rng(seed)
    true = random_.normal(0.8, 1.5, (count, len(temperatures)))
    kept = random_.random(true.shape) < 1 / (1 + np.exp(-true))
    return true * temperatures, np.logical_and.accumulate(kept, axis=1)


def test_temperatures_are_those_by_which_the_head_was_wrong():
    wrong = np.array([3.0, 0.5, 1.0])
    logits, accepted = rounds(wrong)
    found = fit_temperatures(logits, accepted)
    assert np.abs(np.log(np.array(found) / wrong)).max() < 0.35
    others, kept = rounds(wrong, seed=1)
    before, after = (metrics.confidence_scores(reach(others, t), kept)["ece"][-1] for t in (None, found))
    assert after < before / 2, "on other rounds than those that they were fitted on"


def test_each_temperature_is_the_best_of_all_given_those_before_it():
    logits, accepted = rounds(np.array([2.0, 2.0, 0.3]), count=150, seed=3)
    logits[100:, 2] = math.nan  # never at stake there
    found = fit_temperatures(logits, accepted)
    for slot in range(3):
        rows = 100 if slot == 2 else 150

        def error(temperature):
            told = reach(logits[:rows, : slot + 1], [*found[:slot], temperature])[:, slot]
            return metrics.calibration_error(told, accepted[:rows, slot])

        assert error(found[slot]) == pytest.approx(min(map(error, schedule.TEMPERATURES)), abs=1e-9)


def test_where_nothing_is_known_or_to_be_won_the_temperature_is_1():
    logits = np.array([[0.0, math.nan]] * 4)
    assert fit_temperatures(logits, np.array([[True, False], [False, False]] * 2)) == [1.0, 1.0]


# ---- the verified length


def by_hand(reached, stake, seconds):
    """Tokens per second of every length from the definition; the last before the first fall."""
    speeds = []
    for length in range(reached.shape[1] + 1):
        tokens = 0.0
        for row, own in zip(reached, stake):
            tokens += 1 + sum(row[j] for j in range(min(length, own)))
        speeds.append(tokens / seconds[length])
    return next((i for i in range(len(speeds) - 1) if speeds[i + 1] < speeds[i]), len(speeds) - 1)


@pytest.mark.parametrize("seed", range(40))
def test_the_verified_length_is_the_last_before_expected_tokens_per_second_fall(seed):
    rng = random.Random(seed)
    rows, slots = rng.randint(1, 4), rng.randint(0, 6)
    reached = np.array([[rng.random() for _ in range(slots)] for _ in range(rows)]).reshape(rows, slots).cumprod(1)
    stake = np.array([rng.randint(0, slots) for _ in range(rows)])
    seconds = np.cumsum([1.0] + [0.3 * rng.random() for _ in range(slots)])
    assert verified_length(reached, stake, seconds) == by_hand(reached, stake, seconds)


def test_free_verification_takes_the_whole_block_and_dear_verification_none():
    reached = np.array([[0.9, 0.5, 0.0]])
    assert verified_length(reached, np.array([3]), [1, 1, 1, 1]) == 3
    assert verified_length(reached, np.array([3]), [1, 2, 3, 4]) == 0
    assert verified_length(reached, np.array([3]), [1, 1.5, 3, 3]) == 1
    assert verified_length(reached[:, :0], np.array([0]), [1, 1]) == 0


def test_where_each_token_costs_alike_the_first_fall_is_the_last():
    rng = random.Random(0)
    for _ in range(300):
        reached = np.array([[rng.random() for _ in range(7)] for _ in range(3)]).cumprod(1)
        seconds = 1 + rng.random() * 0.5 * np.arange(8)
        speeds = (3 + np.append(0, reached.sum(0).cumsum())) / seconds
        assert verified_length(reached, np.array([7] * 3), seconds) == np.argmax(speeds)


def test_what_comes_later_changes_no_decision_before():
    """Slot j is verified or not, whatever the confidences after it."""
    rng = random.Random(0)
    for _ in range(300):
        first = [rng.random() for _ in range(4)]
        second = [rng.random() for _ in range(4)]
        seconds = np.cumsum([1.0] + [0.4 * rng.random() for _ in range(4)])
        for same in range(5):
            mixed = first[:same] + second[same:]
            lengths = [verified_length(np.cumprod([c], axis=1), np.array([4]), seconds) for c in (first, mixed)]
            assert min(lengths[0], same) == min(lengths[1], same)


def test_a_schedule_asks_what_calls_of_so_many_rows_cost():
    free, dear = [1.0, 1.0, 1.0], [1.0, 5.0, 9.0]
    plan = Schedule({1: free, 5: dear})
    reached = np.array([[0.9, 0.8]])
    assert plan.length(reached, [2]) == 2
    assert plan.length(reached.repeat(5, 0), [2] * 5) == plan.length(reached.repeat(9, 0), [2] * 9) == 0
    between = verified_length(reached.repeat(2, 0), np.array([2, 2]), [1.0, 2.0, 3.0])
    assert plan.length(reached.repeat(2, 0), [2, 2]) == between


# ---- the exact distribution of a round on two tokens; p is the draft's, q the target's


def peeking(reached, stake, seconds):
    """The maximum over all lengths: no early stop, so the confidence after a token has a say in its verification."""
    speeds = [(1 + reached[0, :length].sum()) / seconds[length] for length in range(reached.shape[1] + 1)]
    return int(np.argmax(speeds))


def distribution(rule, p, q, confidence, seconds):
    """Exact probabilities of the first two tokens of texts that one draft token by token and rejection write.

    Args:
        rule: of the verified length.
        p, q: texts so far -> (2,) probabilities of the next token.
        confidence: texts so far -> c of the next drafted token.
    """
    result = dict.fromkeys(itertools.product(range(2), repeat=2), 0.0)

    def write(text, weight):
        """What is still missing comes from the target: later rounds are right if this one is."""
        if not weight:
            return
        if len(text) >= 2:
            result[text[:2]] += weight
        else:
            for token in range(2):
                write((*text, token), weight * q(text)[token])

    for drafted in itertools.product(range(2), repeat=2):
        weight = p(())[drafted[0]] * p(drafted[:1])[drafted[1]]
        reached = np.cumprod([[confidence(drafted[:slot]) for slot in range(2)]], axis=1)
        length = rule(reached, np.array([2]), seconds)
        for slot in range(length):
            before = drafted[:slot]
            ours, theirs = p(before), q(before)
            keep = min(1, theirs[drafted[slot]] / ours[drafted[slot]])
            rest = [max(b - a, 0) for a, b in zip(ours, theirs)]
            for token in range(2):
                if weight * (1 - keep):
                    write((*before, token), weight * (1 - keep) * rest[token] / sum(rest))
            weight *= keep
        write(drafted[:length], weight)
    return result


# After A the draft is sure of its next token, after B it is not; a second slot pays only together with the first.
CASE = {
    "p": lambda text: (0.5, 0.5),
    "q": lambda text: (0.7, 0.3) if not text else (0.5, 0.5) if text[0] == 0 else (0.1, 0.9),
    "confidence": lambda text: 0.8 if not text else (0.99 if text[0] == 0 else 0.01),
    "seconds": [1.0, 1.85, 2.0],
}


def exact(q):
    return {(a, b): q(())[a] * q((a,))[b] for a in range(2) for b in range(2)}


@pytest.mark.parametrize("seconds", [[1.0, 1.85, 2.0], [1.0, 1.1, 1.2], [1.0, 1.7, 1.9], [1.0, 1.7, 4.0]])
def test_a_schedule_that_stops_early_leaves_the_targets_distribution(seconds):
    case = {**CASE, "seconds": seconds}
    found = distribution(verified_length, **case)
    assert found == pytest.approx(exact(CASE["q"]), abs=1e-12)
    if seconds == [1.0, 1.7, 1.9]:  # both lengths come up, so the schedule does choose
        sure, unsure = ([[0.8, 0.8 * c]] for c in (0.99, 0.01))
        assert [verified_length(np.array(a), np.array([2]), seconds) for a in (sure, unsure)] == [2, 1]


def test_one_that_looks_at_later_tokens_does_not():
    """The paper's counterexample: A is verified where it is drafted, and left to the target where B is."""
    found = distribution(peeking, **CASE)
    first = found[0, 0] + found[0, 1]
    assert first == pytest.approx(0.85) and exact(CASE["q"])[0, 0] + exact(CASE["q"])[0, 1] == pytest.approx(0.7)
