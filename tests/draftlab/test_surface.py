"""The speed surface: predictions by hand, and a measurement of the tiny target."""

import dataclasses
import math

import pytest

from draftlab import decode, surface
from draftlab.config import DraftConfig, TargetConfig
from draftlab.decode import Sampling
from draftlab.draft import Draft, adapt
from draftlab.surface import Surface
from draftlab.target import load_target


def quiet(*_, **__):
    """No progress."""


HAND = Surface(
    context=100,
    rounds={(2, 1): (1.0, 4.0, 0.0), (4, 1): (1.0, 5.0, 0.0), (8, 1): (1.0, 9.0, 0.0), (4, 8): (2.0, 20.0, 2.0)},
    target={(1, 100): 4.0, (1, 300): 6.0, (8, 100): 8.0},
)


def test_a_round_commits_one_token_and_those_that_survive():
    two, three, four = surface.predict(HAND, [0.8, 0.5, 0.25], 1)
    assert [row["acceptance_length"] for row in (two, three, four)] == pytest.approx([1.8, 2.3, 2.55])
    assert two["speedup"] == pytest.approx(1.8 * 4 / 5) and four["tokens_per_second"] == pytest.approx(2.55 / 6)
    assert three["speedup"] == pytest.approx(2.3 * 4 / 5.5), "between 2 and 4"
    assert two["break_even"] == pytest.approx(5 / 4)
    assert two["slot_gain"] == pytest.approx(1.8 * 4 / 5 - 1)
    assert three["slot_gain"] == pytest.approx(three["speedup"] - two["speedup"]) and four["slot_gain"] > 0
    assert surface.best([two, three, four]) is four


def test_at_the_break_even_acceptance_the_speedup_is_1():
    for row in surface.predict(HAND, [0.8, 0.5, 0.25], 1):
        assert row["speedup"] / row["acceptance_length"] * row["break_even"] == pytest.approx(1)


def test_a_larger_batch_and_a_longer_context_have_their_own_times():
    (only,) = surface.predict(HAND, [0.5] * 3, 8)  # nothing is said of blocks below the smallest that was timed
    assert only["block_size"] == 4 and only["tokens_per_second"] == pytest.approx(8 * 2.5 / 24)
    assert math.isnan(only["slot_gain"])
    assert HAND.target_seconds(1, 200) == 5.0
    near, far = (surface.predict(HAND, [0.5], 1, context)[0]["speedup"] for context in (100, 300))
    assert far == pytest.approx(near * 6 / 4)


def test_a_slot_that_was_never_reached_adds_nothing():
    rows = surface.predict(HAND, [0.5, math.nan, math.nan], 1)
    assert rows[-1]["acceptance_length"] == 1.5 and rows[-1]["slot_gain"] < 0 and surface.best(rows) is rows[0]


def test_prediction_stands_beside_measurement():
    predicted = surface.predict(HAND, [0.8, 0.5, 0.25], 1)
    measured = [
        {"block_size": size, "acceptance_length": 2.0, "speedup": speed, "speedup_low": speed - 0.1,
         "speedup_high": speed + 0.1} for size, speed in ((2, 1.5), (4, 1.6), (16, 9.0))
    ]  # fmt: skip
    two, four = surface.against_measurement(predicted, measured)
    assert (two["block_size"], four["block_size"]) == (2, 4)
    assert two["error"] == pytest.approx(predicted[0]["speedup"] / 1.5 - 1)
    assert surface.agrees([two, four])
    assert surface.agrees([{**two, "predicted_speedup": 9.0}, four]), "1.5 is within 1.6's interval"
    assert not surface.agrees([{**two, "predicted_speedup": 9.0, "measured_speedup": 1.49}, four])


def test_in_the_layout_next_a_block_of_b_drafts_b_tokens():
    hand = dataclasses.replace(HAND, first_slot=0)
    two, three = surface.predict(hand, [0.8, 0.5, 0.25], 1)
    assert (two["block_size"], two["drafted_tokens"], three["drafted_tokens"]) == (2, 2, 3)
    assert two["acceptance_length"] == pytest.approx(2.3) and two["speedup"] == pytest.approx(2.3 * 4 / 5)
    assert three["acceptance_length"] == pytest.approx(2.55) and three["speedup"] == pytest.approx(2.55 * 4 / 5.5)
    assert math.isnan(two["slot_gain"]), "a block of one token was not timed"
    assert three["slot_gain"] == pytest.approx(three["speedup"] - two["speedup"])


def test_a_round_drafts_a_whole_block_and_verifies_as_much_of_it_as_it_is_told():
    # Of a batch of 8: 2 to draft, 8 for the target's call alone and 22 to verify 3 guesses.
    assert HAND.seconds_by_length(4, 8) == pytest.approx([10, 2 + 8 + 14 / 3, 2 + 8 + 28 / 3, 24])
    # Of one row: 1 to draft, and 4, 4, 5 and 9 to verify 0, 1, 3 and 7; by least squares 21.5 / 28.75 a guess.
    slope = 21.5 / 28.75
    assert HAND.seconds_by_length(8, 1) == pytest.approx([1 + 5.5 + slope * (length - 2.75) for length in range(8)])
    hand = dataclasses.replace(HAND, first_slot=0, target={(8, 100): 8.0})
    assert hand.seconds_by_length(4, 8) == pytest.approx([10, 13.5, 17, 20.5, 24])
    noise = dataclasses.replace(HAND, target={(8, 100): 30.0})
    assert noise.seconds_by_length(4, 8) == pytest.approx([2 + 26] * 4), "more is never cheaper"


def test_every_cell_is_measured():
    target = load_target(TargetConfig(model="tiny", dtype="float32", device="cpu"))
    target.eos_token_ids = frozenset({target.vocab_size})
    config = DraftConfig(block_size=4, num_hidden_layers=1, target_layer_ids=[0, 2])
    draft = Draft(adapt(target.config, config, target.mask_token_id))
    draft.reset(0)
    texts = [target.chat([{"role": "user", "content": text}]) for text in ("How many?", "Why?")]
    found = surface.measure(target, draft.eval(), texts, [2, 5], [1, 3], [8, 40, 90], quiet)
    assert set(found.rounds) == {(2, 1), (5, 1), (2, 3), (5, 3)} and found.context == 40
    assert set(found.target) == {(batch, context) for batch in (1, 3) for context in (8, 40, 90)}
    assert all(seconds > 0 for parts in found.rounds.values() for seconds in parts)
    assert all(seconds > 0 for seconds in found.target.values())


@pytest.mark.parametrize("pace, size", [(1, 16), (4, 16), (16, 16), (8, 8)])
def test_a_good_drafts_rounds_are_timed_whole_and_as_many(monkeypatch, pace, size):
    """Rounds at a text's end verify fewer tokens; here a token verified costs a millisecond."""
    target = load_target(TargetConfig(model="tiny", dtype="float32", device="cpu"))
    config = DraftConfig(block_size=size, num_hidden_layers=1, target_layer_ids=[0, 2])
    draft, asked = Draft(adapt(target.config, config, target.mask_token_id)), []

    def rounds(target, draft, prompts, limit, block_size, sampling):
        asked.append(limit)
        found, left = [], limit - 1
        while left > 0:
            drafted, committed = min(block_size - 1, left - 1), min(pace, left)
            found.append(decode.Round(drafted, committed - 1, committed, 0.0, 1e-3 * (1 + drafted), 0.0))
            left -= committed
        return [decode.Trace(3, [1] * limit, 0.1, 1.0, found)]

    monkeypatch.setattr(surface, "decode_speculative", rounds)
    found = surface.measure(target, draft, [[65] * 5], [size], [1], [5], quiet)
    assert found.rounds[size, 1] == pytest.approx((0, 1e-3 * size, 0))
    assert max(asked) <= surface.most_tokens(size)


def test_calls_are_timed_with_the_sampling_that_is_asked_for(monkeypatch):
    target = load_target(TargetConfig(model="tiny", dtype="float32", device="cpu"))
    config = DraftConfig(block_size=4, num_hidden_layers=1, target_layer_ids=[0, 2])
    draft = Draft(adapt(target.config, config, target.mask_token_id))
    draft.reset(0)
    draw, drawn = decode.draw, []
    monkeypatch.setattr(decode, "draw", lambda p, uniform: (drawn.append(len(p)), draw(p, uniform))[1])
    surface.schedule(target, draft.eval(), [[65] * 5], 4, 1, quiet)
    assert not drawn
    surface.schedule(target, draft, [[65] * 5], 4, 1, quiet, Sampling(1.0))
    assert 1 in drawn and 3 in drawn, "the target's token, and the draft's three"


@pytest.mark.parametrize("variant, slots", [("dflash", 5), ("dspark", 6)])
def test_a_schedule_has_a_cost_of_every_length_for_one_row_and_for_a_batch(variant, slots):
    target = load_target(TargetConfig(model="tiny", dtype="float32", device="cpu"))
    config = DraftConfig(block_size=6, num_hidden_layers=1, target_layer_ids=[0, 2], variant=variant)
    draft = Draft(adapt(target.config, config, target.mask_token_id))
    draft.reset(0)
    target.max_positions = 140  # no room for the longer text
    plan = surface.schedule(target, draft.eval(), [[65] * 5, [70] * 140], 6, 3, quiet)
    assert set(plan.seconds) == {1, 3}
    assert all(len(costs) == slots + 1 and min(costs) > 0 for costs in plan.seconds.values())
