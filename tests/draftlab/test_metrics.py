"""Every metric against a plain loop over hand-made or random traces."""

import itertools
import math
import random

import numpy as np
import pytest
import torch

from draftlab import metrics
from draftlab.decode import Round, Trace


def trace(*rounds, seconds=1.0, prefill=0.5, tokens=None):
    """A trace of (drafted, accepted, committed) rounds."""
    made = [Round(d, a, c, 0.01, 0.03, 0.005) for d, a, c in rounds]
    count = 1 + sum(r.committed for r in made) if tokens is None else tokens
    return Trace(5, list(range(count)), prefill, seconds, made)


def random_traces(block_size, count, seed):
    """Texts decoded by slots that are each accepted with their own probability, ended by EOS or a limit."""
    rng, traces = random.Random(seed), []
    chances = [rng.random() for _ in range(block_size - 1)]
    for _ in range(count):
        rounds, room = [], rng.randint(1, 40)
        while room:
            drafted = min(block_size - 1, room - 1)
            accepted = 0
            while accepted < drafted and rng.random() < chances[accepted]:
                accepted += 1
            if accepted and rng.random() < 0.05:  # the last accepted token was EOS
                rounds.append((accepted, accepted, accepted))
                break
            rounds.append((drafted, accepted, accepted + 1))
            room -= accepted + 1
        traces.append(trace(*rounds))
    return traces


CASES = [(b, seed) for b in (2, 3, 8, 16) for seed in range(4)]


@pytest.mark.parametrize("block_size, seed", CASES)
def test_acceptance_length_is_committed_tokens_per_round(block_size, seed):
    traces = random_traces(block_size, 9, seed)
    tokens = rounds = 0
    means = []
    for t in traces:
        own = [r.committed for r in t.rounds]
        tokens, rounds = tokens + sum(own), rounds + len(own)
        means.append(sum(own) / len(own))
    assert metrics.acceptance_length(traces) == pytest.approx(tokens / rounds)
    assert metrics.acceptance_length_macro(traces) == pytest.approx(sum(means) / len(means))


def test_pooled_and_macro_acceptance_differ_when_texts_do():
    traces = [trace((3, 3, 4)), trace((3, 0, 1), (3, 0, 1), (3, 0, 1))]
    assert metrics.acceptance_length(traces) == pytest.approx(7 / 4)
    assert metrics.acceptance_length_macro(traces) == pytest.approx((4 + 1) / 2)


def test_a_text_that_ended_at_its_first_token_has_no_round_and_no_weight():
    traces = [trace(tokens=1, seconds=0.0), trace((3, 1, 2))]
    assert metrics.acceptance_length(traces) == metrics.acceptance_length_macro(traces) == 2
    assert math.isnan(metrics.acceptance_length(traces[:1]))
    assert math.isnan(metrics.acceptance_length_macro(traces[:1]))


@pytest.mark.parametrize("block_size, seed", CASES)
def test_slot_statistics_equal_counting_round_by_round(block_size, seed):
    traces = random_traces(block_size, 30, seed)
    rounds = [r for t in traces for r in t.rounds]
    conditional, failures = [], [0] * block_size
    for k in range(1, block_size):
        reached = [r for r in rounds if r.accepted >= k - 1 and r.drafted >= k]
        conditional.append(sum(r.accepted >= k for r in reached) / len(reached) if reached else math.nan)
    for r in rounds:
        if r.accepted == block_size - 1:
            failures[-1] += 1
        elif r.accepted < r.drafted:
            failures[r.accepted] += 1
    survival = [math.prod(conditional[:k]) for k in range(1, block_size)]
    survival = [0.0 if 0.0 in conditional[:k] else s for k, s in enumerate(survival, 1)]
    np.testing.assert_allclose(metrics.conditional_acceptance(traces, block_size), conditional)
    np.testing.assert_allclose(metrics.survival(traces, block_size), survival)
    assert metrics.first_failure(traces, block_size).tolist() == failures
    np.testing.assert_allclose(metrics.full_block_fraction(traces, block_size), survival[-1])


@pytest.mark.parametrize("seed", range(4))
def test_survival_is_the_plain_share_where_no_text_ends_and_sums_to_the_acceptance_length(seed):
    rng = random.Random(seed)
    runs = [rng.randint(0, 7) for _ in range(200)]
    traces = [trace(*[(7, a, a + 1) for a in runs])]
    survival = metrics.survival(traces, 8)
    np.testing.assert_allclose(survival, [sum(a >= k for a in runs) / len(runs) for k in range(1, 8)])
    assert 1 + survival.sum() == pytest.approx(metrics.acceptance_length(traces))
    assert metrics.full_block_fraction(traces, 8) == pytest.approx(runs.count(7) / len(runs))


def test_rounds_cut_by_the_end_of_a_text_do_not_count_as_failures():
    # Slot 1 always holds; the second text ended after one slot. Without care slot 2 would look half as good.
    traces = [trace((2, 2, 3)), trace((1, 1, 1))]
    assert metrics.survival(traces, 3).tolist() == [1.0, 1.0]
    assert metrics.first_failure(traces, 3).tolist() == [0, 0, 1]


def test_slots_that_nothing_reached_are_zero_after_a_failure_and_unknown_otherwise():
    assert metrics.survival([trace((3, 0, 1))], 4).tolist() == [0, 0, 0]
    assert math.isnan(metrics.conditional_acceptance([trace((3, 0, 1))], 4)[1])
    np.testing.assert_equal(metrics.survival([trace((1, 1, 1))], 4), [1, math.nan, math.nan])


def test_speedup_compares_seconds_per_output_token():
    target = [trace(tokens=11, seconds=2.0), trace(tokens=21, seconds=4.0)]
    drafts = [trace((3, 3, 4), (3, 3, 4), (3, 1, 2), seconds=1.0), trace(*[(3, 3, 4)] * 5, seconds=1.0)]
    assert metrics.speedup(target, drafts) == pytest.approx((6 / 30) / (2 / 30))
    assert metrics.speedup(target, drafts, end_to_end=True) == pytest.approx((7 / 32) / (3 / 32))


def test_speedup_does_not_reward_a_shorter_text():
    target, short = [trace(tokens=21, seconds=2.0)], [trace(tokens=11, seconds=1.0)]
    assert metrics.speedup(target, short) == pytest.approx(1.0)


def test_speedup_refuses_traces_of_other_prompts():
    with pytest.raises(ValueError, match="one target trace a draft trace, got 2 and 1"):
        metrics.speedup([trace(), trace()], [trace()])


@pytest.mark.parametrize("seed", range(3))
def test_speedup_is_acceptance_length_times_target_time_over_round_time(seed):
    drafts = []
    for t in random_traces(8, 6, seed):
        spent = sum(r.draft_seconds + r.verify_seconds + r.commit_seconds for r in t.rounds)
        drafts.append(Trace(5, t.tokens, 0.1, spent, t.rounds))
    targets = [trace(tokens=len(t.tokens), seconds=0.02 * len(t.tokens)) for t in drafts]
    times = metrics.call_times(targets, drafts)
    round_ms = times["draft_ms"] + times["verify_ms"] + times["commit_ms"]
    assert (times["draft_ms"], times["verify_ms"], times["commit_ms"]) == pytest.approx((10, 30, 5))
    predicted = metrics.acceptance_length(drafts) * times["target_ms"] / round_ms
    assert metrics.speedup(targets, drafts) == pytest.approx(predicted)


def test_rows_per_call_is_the_mean_over_calls():
    shared = [Round(3, 1, 2, 0.01, 0.03, 0.005, rows) for rows in (2, 2, 1)]
    traces = [Trace(5, [], 0.0, 0.0, shared[:2]), Trace(5, [], 0.0, 0.0, shared[1:])]
    assert metrics.rows_per_call(traces) == pytest.approx(4 / 2.5)  # calls: two of 2 rows (seen twice), one half seen
    assert math.isnan(metrics.rows_per_call([trace()]))


def test_the_typical_repeat_is_the_median_one():
    repeats = [trace(seconds=s) for s in (3.0, 1.0, 2.0, 9.0, 4.0)]
    assert metrics.typical(repeats).seconds == 3.0
    assert metrics.typical(repeats[:2]).seconds == 1.0
    assert metrics.typical(repeats[:1]).seconds == 3.0


def test_the_bootstrap_interval_is_that_of_a_plain_resampling_loop():
    items = np.random.default_rng(1).uniform(1, 5, size=(12, 2))
    rng, values = random.Random(0), []
    for _ in range(4000):
        drawn = [items[rng.randrange(len(items))] for _ in items]
        values.append(sum(i[0] for i in drawn) / sum(i[1] for i in drawn))
    values.sort()
    low, high = metrics.bootstrap(metrics.ratio, items, 4000, seed=3)
    assert low == pytest.approx(values[100], abs=0.03) and high == pytest.approx(values[3900], abs=0.03)
    assert low < float(metrics.ratio(items)) < high
    assert (low, high) == metrics.bootstrap(metrics.ratio, items, 4000, seed=3)


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    rng, covered = np.random.default_rng(0), 0
    for i in range(200):
        rounds = rng.integers(5, 30, size=40)
        committed = rng.binomial(rounds * 4, 0.5)
        low, high = metrics.bootstrap(metrics.ratio, np.stack([committed, rounds], 1).astype(float), 300, seed=i)
        covered += low <= 2.0 <= high
    assert 0.88 < covered / 200 <= 0.99


def test_one_prompt_has_no_interval():
    assert all(math.isnan(x) for x in metrics.bootstrap(metrics.ratio, np.ones((1, 2)), 100))


def test_a_draw_without_any_round_does_not_spoil_the_interval():
    low, high = metrics.bootstrap(metrics.ratio, np.array([[4.0, 2.0], [0.0, 0.0]]), 200)
    assert low == high == 2.0


def test_a_paired_difference_is_narrower_than_the_spread_between_prompts():
    rng = np.random.default_rng(0)
    easy = rng.uniform(1, 8, size=30)  # prompts differ much more than the two drafts do
    first = np.stack([easy + 0.2 + rng.normal(0, 0.05, 30), np.ones(30)], 1)
    second = np.stack([easy, np.ones(30)], 1)
    difference = metrics.difference(metrics.ratio, 2)
    both = np.hstack([first, second])
    assert float(difference(both)) == pytest.approx(float(metrics.ratio(first)) - float(metrics.ratio(second)))
    low, high = metrics.bootstrap(difference, both, 1000)
    assert 0.1 < low < 0.2 < high < 0.3
    low, high = metrics.bootstrap(difference, np.hstack([first, first]), 1000)
    assert low == high == 0


def committed_by_decoding(correct, valid):
    """A round replayed: drafted tokens are accepted until one is wrong; where the text is over, nothing follows."""
    committed = 0
    for right, exists in zip([*correct, False], valid):  # behind the last drafted token is the target's own
        if not exists:
            return committed
        committed += 1
        if not right:
            return committed  # the target's own token instead


def test_offline_acceptance_equals_replayed_rounds_for_every_pattern():
    some, more = (list(itertools.product([False, True], repeat=count)) for count in (4, 5))
    pairs = [(c, v) for c in some for v in more]
    expected = [committed_by_decoding(c, v) for c, v in pairs]
    correct, valid = np.array([c for c, _ in pairs]), np.array([v for _, v in pairs])
    assert metrics.offline_committed(correct, valid).tolist() == expected
    assert metrics.offline_acceptance(correct, valid) == (sum(expected), sum(v[0] for _, v in pairs))


def test_offline_acceptance_is_additive_and_ignores_the_shape():
    rng = np.random.default_rng(0)
    correct, valid = rng.random((6, 5, 7)) < 0.7, rng.random((6, 5, 8)) < 0.9
    whole = metrics.offline_acceptance(correct, valid)
    parts = [metrics.offline_acceptance(correct[i], valid[i]) for i in range(6)]
    assert whole == (sum(p[0] for p in parts), sum(p[1] for p in parts))


def test_a_masked_hole_truncates_the_run_and_is_not_skipped():
    correct, valid = np.array([True, True, True]), np.array([True, False, True, True])
    assert metrics.offline_acceptance(correct, valid) == (1, 1)


def test_offline_acceptance_takes_torch_tensors_and_refuses_other_shapes():
    assert metrics.offline_acceptance(torch.tensor([[True, False]]), torch.tensor([[True] * 3])) == (2, 1)
    with pytest.raises(ValueError, match="one longer"):
        metrics.offline_acceptance(np.ones((2, 3)), np.ones((2, 3)))


def test_the_serving_walk_restarts_where_the_accepted_run_ended():
    #            0  1  2  3  4  5  6  7  8
    committed = [0, 3, 1, 1, 2, 5, 0, 0, 1]  # rounds at 1, 4 and 8 (4 + 2 = 6 is no anchor, nor is 7)
    assert metrics.serving_walk(np.array(committed)) == (3 + 2 + 1, 3)
    assert metrics.serving_walk(np.zeros(4, int)) == (0, 0)
    assert metrics.serving_walk(np.ones(6, int)) == (6, 6)


@pytest.mark.parametrize("paired", [False, True], ids=["one draft", "difference of two"])
def test_intervals_cover_the_truth_95_times_in_100(paired):
    """Prompts differ in length and in how well they can be guessed; the truth is the ratio of the means."""
    rng, repetitions, prompts = np.random.default_rng(0), 2000, 60

    def draw(count):
        rounds = rng.integers(10, 60, count)
        easy = rng.uniform(0.5, 3.5, count)
        return [np.stack([rounds + rng.poisson(easy * rounds * gain), rounds], 1) for gain in (1.0, 1.1)]

    statistic = metrics.difference(metrics.ratio, 2) if paired else metrics.ratio
    truth = 2.0 * 0.1 if paired else 1 + 2.0  # 1 + E[easy]; the second draft is guessed a tenth better
    covered = 0
    for repetition in range(repetitions):
        first, second = draw(prompts)
        items = np.hstack([second, first]) if paired else first
        low, high = metrics.bootstrap(statistic, items.astype(float), 500, seed=repetition)
        covered += low <= truth <= high
    assert 0.93 <= covered / repetitions <= 0.97


# ---- tests of distributions


@pytest.mark.parametrize("cells", [2, 6, 60])
def test_chi_square_is_uniform_under_the_truth_and_equals_the_exact_tail(cells):
    rng = np.random.default_rng(cells)
    expected = 5000 * rng.dirichlet(np.full(cells, 5.0))
    found = np.array([metrics.chi_square(rng.multinomial(5000, expected / 5000), expected) for _ in range(2000)])
    assert abs((found < 0.05).mean() - 0.05) < 0.016
    assert abs(found.mean() - 0.5) < 0.03
    observed = rng.multinomial(5000, expected / 5000)
    assert (expected >= 5).all()
    statistic = torch.tensor(((observed - expected) ** 2 / expected).sum())
    exact = torch.special.gammaincc(torch.tensor((cells - 1) / 2, dtype=torch.float64), statistic.double() / 2)
    assert metrics.chi_square(observed, expected) == pytest.approx(exact.item(), rel=0.05)


def test_two_samples_are_uniform_under_one_distribution_and_catch_two():
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.full(20, 2.0), size=2)
    found = [metrics.two_samples(rng.multinomial(400, p), rng.multinomial(900, p)) for _ in range(2000)]
    assert abs((np.array(found) < 0.05).mean() - 0.05) < 0.016
    assert metrics.two_samples(rng.multinomial(400, p), rng.multinomial(900, q)) < 1e-6


def test_rare_cells_count_as_one_and_the_impossible_is_caught():
    expected = np.array([50.0, 40.0, 3.0, 4.0, 3.0, 0.0])
    assert metrics.chi_square(np.array([48, 42, 0, 10, 0, 0]), expected) > 0.5
    assert metrics.chi_square(np.array([48, 42, 0, 0, 0, 10]), expected) > 0.5, "a rare cell hides a small fault"
    assert metrics.chi_square(np.array([50, 49, 1]), np.array([50.0, 50.0, 0.0])) == 0.0
    assert math.isnan(metrics.chi_square(np.array([7]), np.array([7.0])))
    assert math.isnan(metrics.two_samples(np.array([7, 0]), np.array([9, 0])))


def test_the_macro_figure_is_a_mean_over_prompts_however_many_turns_they_have():
    items = np.array([[8.0, 2.0], [1.0, 1.0], [0.0, 0.0]])  # tau 4 over two turns, tau 1, and no round at all
    assert metrics.macro_statistic(items) == 2.5


# ---- the confidence head


def calibration_error(probabilities, outcomes):
    """Bin by bin, by comparing with the bins' edges."""
    error = 0.0
    for b in range(10):
        inside = [i for i, p in enumerate(probabilities) if b / 10 <= p < (b + 1) / 10 or (b == 9 and p == 1)]
        if inside:
            mean = sum(probabilities[i] for i in inside) / len(inside)
            error += len(inside) / len(probabilities) * abs(mean - sum(outcomes[i] for i in inside) / len(inside))
    return error


def area_under_curve(probabilities, outcomes):
    """All pairs of a true and a false one."""
    wins = [(p > q) + (p == q) / 2 for p, y in zip(probabilities, outcomes) if y
            for q, z in zip(probabilities, outcomes) if not z]  # fmt: skip
    return sum(wins) / len(wins)


@pytest.mark.parametrize("seed", range(5))
def test_the_scores_of_a_probability_equal_plain_loops(seed):
    rng = random.Random(seed)
    probabilities = [rng.choice([rng.random(), 0.0, 1.0, 0.35]) for _ in range(80)]
    outcomes = [rng.random() < p**2 or rng.random() < 0.1 for p in probabilities]
    found = np.array(probabilities), np.array(outcomes)
    assert metrics.calibration_error(*found) == pytest.approx(calibration_error(probabilities, outcomes), abs=1e-12)
    assert metrics.area_under_curve(*found) == pytest.approx(area_under_curve(probabilities, outcomes), abs=1e-12)
    squares = [(p - y) ** 2 for p, y in zip(probabilities, outcomes)]
    assert metrics.brier_score(*found) == pytest.approx(sum(squares) / 80, abs=1e-12)


def test_scores_of_hand_made_probabilities():
    right, sure = np.array([False, True] * 50), np.array([0.0, 1.0] * 50)
    assert metrics.calibration_error(sure, right) == metrics.brier_score(sure, right) == 0
    assert (metrics.area_under_curve(sure, right), metrics.area_under_curve(1 - sure, right)) == (1, 0)
    assert metrics.calibration_error(1 - sure, right) == metrics.brier_score(1 - sure, right) == 1
    half = np.full(100, 0.5)
    assert metrics.calibration_error(half, right) == 0 and metrics.area_under_curve(half, right) == 0.5
    assert math.isnan(metrics.area_under_curve(sure, np.ones(100, bool)))
    assert math.isnan(metrics.calibration_error(half[:0], right[:0]))
    assert math.isnan(metrics.brier_score(half[:0], right[:0]))


def sure_round(drafted, accepted, *logits):
    return Round(drafted, accepted, accepted + 1, 0.01, 0.03, 0.005, confidence=logits)


def test_confidence_items_hold_what_was_at_stake_and_what_came_of_it():
    first = Trace(5, [], 0.0, 0.0, [sure_round(3, 1, 0.1, 0.2, 0.3), sure_round(1, 1, 0.4)])
    second = Trace(5, [], 0.0, 0.0, [sure_round(0, 0), sure_round(3, 3, 0.5, 0.6, 0.7)])
    logits, accepted = metrics.confidence_items([first, second], 4)
    nan = math.nan
    np.testing.assert_equal(logits, [[0.1, 0.2, 0.3], [0.4, nan, nan], [nan, nan, nan], [0.5, 0.6, 0.7]])
    assert accepted[[0, 3]].tolist() == [[True, False, False], [True, True, True]] and accepted[1, 0]
    empty, _ = metrics.confidence_items([], 4)
    assert empty.shape == (0, 3)


def test_confidence_is_scored_slot_by_slot_over_the_rounds_that_had_it_at_stake():
    random_ = np.random.default_rng(0)
    reached = random_.random((60, 3)).cumprod(1)
    accepted = random_.random((60, 3)) < 0.5
    reached[40:, 2] = math.nan
    found = metrics.confidence_scores(reached, accepted)
    for name, plain in (("ece", calibration_error), ("auc", area_under_curve)):
        slots = [plain(reached[:rows, k].tolist(), accepted[:rows, k].tolist()) for k, rows in enumerate((60, 60, 40))]
        mean = (60 * slots[0] + 60 * slots[1] + 40 * slots[2]) / 160
        np.testing.assert_allclose(found[name], [*slots, mean])
    nothing = metrics.confidence_scores(reached[:0], accepted[:0])
    assert all(np.isnan(scores).all() and len(scores) == 4 for scores in nothing.values())


def test_verified_tokens_are_those_at_stake_on_average():
    assert metrics.verified_tokens([trace((3, 1, 2), (0, 0, 1)), trace((3, 3, 4))]) == 2
    assert math.isnan(metrics.verified_tokens([]))
