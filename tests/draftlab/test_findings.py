"""Verdicts against cases whose answer is known, and the sentence that they make."""

import math
import re

import numpy as np
import pytest

from draftlab import findings
from draftlab.decode import Round, Trace
from draftlab.evaluation import Case, Pair


def pairs(lengths, first=0):
    """A prompt each, decoded in ten rounds of so many tokens."""
    def drafted(tokens):
        return Trace(3, [1], 0.1, 1.0, [Round(9, tokens - 1, tokens, 0.1, 0.1, 0.1)] * 10)

    cases = [Case(i, 1, "heldout", f"prompt {i}", [1]) for i in range(first, first + len(lengths))]
    return [Pair(case, Trace(3, [1], 0.1, 1.0), drafted(tokens)) for case, tokens in zip(cases, lengths)]


def judged(arms, baseline=None):
    return {one.arm: one for one in findings.verdicts(arms, "acceptance_length", baseline, 500, seed=0)}


NOISY = np.random.default_rng(0).integers(2, 9, 24).tolist()
HIGHER = [n + 1 for n in NOISY]


def test_a_small_difference_that_every_prompt_shows_is_found_though_prompts_differ_by_more():
    found = judged({"low": {0: pairs(NOISY)}, "high": {0: pairs(HIGHER)}})
    assert list(found) == ["high", "low"]
    assert found["high"].verdict == "baseline" and found["low"].verdict == "worse"
    low = found["low"]
    assert low.difference == low.difference_low == low.difference_high == -1
    assert low.low < low.value < low.high and found["high"].low < low.high  # their own intervals overlap


def test_a_baseline_that_is_named_makes_the_better_one_better():
    found = judged({"low": {0: pairs(NOISY)}, "high": {0: pairs(HIGHER)}}, "low")
    assert (found["high"].verdict, found["low"].verdict) == ("better", "baseline")


def test_a_difference_inside_its_interval_is_none():
    shuffled = NOISY[1:] + NOISY[:1]
    shuffled[0] += 1
    found = judged({"a": {0: pairs(NOISY)}, "b": {0: pairs(shuffled)}})
    assert found["a"].verdict == "no difference" and found["a"].difference_low < 0 < found["a"].difference_high


def test_seeds_that_disagree_leave_no_difference_though_each_is_clear_by_itself():
    one = judged({"a": {0: pairs(NOISY)}, "b": {0: pairs(HIGHER)}}, "a")
    two = judged({"a": {0: pairs(NOISY), 1: pairs(HIGHER)}, "b": {0: pairs(HIGHER), 1: pairs(NOISY)}}, "a")
    assert one["b"].verdict == "better"
    assert two["b"].verdict == "no difference" and two["b"].difference == 0 and two["b"].seeds == 2


def test_only_what_both_have_is_compared():
    """A seed that one arm lacks and a prompt that failed for the other are left out."""
    arms = {"a": {0: pairs(NOISY), 1: pairs([9] * 24)}, "b": {0: pairs(HIGHER[4:], first=4)}}
    assert judged(arms, "a")["b"].difference == 1


@pytest.mark.parametrize(
    "arms",
    [{"a": {0: pairs([4])}, "b": {0: pairs([5])}}, {"a": {0: pairs(NOISY)}, "b": {1: pairs(HIGHER)}}],
)
def test_one_prompt_or_no_common_seed_tells_nothing(arms):
    found = judged(arms, "a")
    assert found["b"].verdict == "unknown" and math.isnan(found["b"].difference_low)


def test_a_baseline_without_a_result_gives_way_to_the_best():
    assert judged({"a": {0: pairs(NOISY)}, "b": {0: pairs(HIGHER)}}, "failed")["b"].verdict == "baseline"
    assert judged({}) == {} and judged({"a": {0: []}}) == {}


@pytest.mark.parametrize(
    "arms, baseline, sentence",
    [
        ({}, None, "No trial was measured"),
        ({"a": {0: pairs(NOISY)}}, None, "a is first .* the only one"),
        ({"a": {0: pairs(NOISY)}, "b": {0: pairs(HIGHER)}}, None, "b is first with .*every other that was .*worse"),
        ({"a": {0: pairs(NOISY)}, "b": {0: pairs(NOISY)}}, None, "not told apart from b"),
        ({"a": {0: pairs(NOISY)}, "b": {0: pairs(HIGHER)}}, "a", r"baseline a that is \+1.00 .*: better"),
    ],
)
def test_the_sentence_answers_the_question(arms, baseline, sentence):
    found = list(judged(arms, baseline).values())
    text = findings.answer(found, "acceptance_length")
    assert re.search(sentence, text), text
    page = findings.page("sweep 1", "Which?", text, found, "the table", ["a.png"])
    assert page.startswith(f"# sweep 1\n\n**Which?** {text}") and "![a.png](a.png)" in page and "the table" in page
    assert all(f"| {arm} |" in page for arm in arms)


def test_an_answer_never_contradicts_its_verdicts():
    """One arm has a seed more, another lost the prompts on which it was weak: only what all have ranks them."""
    more_seeds = {"a": {0: pairs(NOISY), 1: pairs([12] * 24)}, "b": {0: pairs(HIGHER)}}
    fewer_prompts = {"a": {0: pairs(HIGHER)}, "b": {0: [one for one, n in zip(pairs(NOISY), NOISY) if n > 5]}}
    for arms, first in ((more_seeds, "b"), (fewer_prompts, "a")):
        found = judged(arms)
        assert list(found)[0] == first and {one.verdict for one in found.values()} == {"baseline", "worse"}
    text = findings.answer(list(judged(more_seeds, "b").values()), "acceptance_length")
    assert "every other that was measured is worse" in text


def test_a_seed_of_which_nothing_was_decoded_leaves_the_others():
    found = judged({"a": {0: pairs(HIGHER), 1: []}, "b": {0: pairs(NOISY), 1: pairs(NOISY)}})
    assert found["b"].verdict == "worse" and found["a"].seeds == 1


def test_one_seed_is_said_to_be_one():
    two = {"a": {0: pairs(NOISY), 1: pairs(NOISY)}, "b": {0: pairs(HIGHER), 1: pairs(HIGHER)}}
    for arms, told in ((two, False), ({arm: {0: seeds[0]} for arm, seeds in two.items()}, True)):
        found = list(judged(arms).values())
        text = findings.answer(found, "acceptance_length")
        assert ("With one seed" in text) == told
        over = "over prompts, diff" if told else "over prompts and seeds, diff"
        assert over in findings.page("t", "q", text, found, "", [])


@pytest.mark.parametrize(
    "arm, baseline, sentence",
    [
        ("high", "low", "The gate proposes layers 3, 7 (high); against low that is +1.00 [+1.00, +1.00]: better."),
        ("low", "high", "The gate proposes layers 3, 7 (low); against high that is -1.00 [-1.00, -1.00]: worse."),
        ("low", "low", "The gate proposes layers 3, 7 (low), which the others are compared with."),
        ("lost", "low", "The gate proposes layers 3, 7 (lost); nothing was measured with them."),
    ],
)
def test_a_gates_proposal_is_confirmed_or_refuted_by_a_sentence(arm, baseline, sentence):
    found = list(judged({"low": {0: pairs(NOISY)}, "high": {0: pairs(HIGHER)}}, baseline).values())
    assert findings.proposal(arm, [3, 7], found) == sentence
    assert findings.proposal(arm, [3], []) == f"The gate proposes layer 3 ({arm}); nothing was measured with them."


def test_the_table_has_a_row_an_arm():
    frame = findings.frame(findings.verdicts({"a": {0: pairs(NOISY)}}, "acceptance_length", None, 100, 0))
    assert frame.loc[0, "arm"] == "a" and frame.loc[0, "verdict"] == "baseline"
