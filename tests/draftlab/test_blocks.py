"""Anchors, inputs, labels and visibility, each against a plain loop over positions."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch

from draftlab import blocks

PUBLISHED = {
    (16, 7): [1, .867, .751, .651, .565, .490, .424, .368, .319, .276, .240, .208, .180, .156, .135],
    (8, 4): [1, .779, .607, .472, .368, .287, .223],
}
"""Weights of the drafted slots by (block size, gamma): exp(-(k-1)/gamma) of arXiv:2602.06036, worked out by hand."""


def corpus(seed, count=5, length=12, share=0.6):
    """ids, supervised and lengths of random sequences; what stands in the padding is as random as the rest."""
    random = np.random.default_rng(seed)
    ids = torch.from_numpy(random.integers(1, 90, (count, length)))
    supervised = torch.from_numpy(random.random((count, length)) < share)
    return ids, supervised, torch.from_numpy(random.integers(1, length + 1, count))


def candidates_by_loop(supervised, lengths):
    return [
        [a for a in range(supervised.shape[1]) if a + 1 < lengths[n] and supervised[n, a + 1]]
        for n in range(len(supervised))
    ]


@pytest.mark.parametrize("pair", PUBLISHED)
def test_position_weights_are_the_published_ones(pair):
    weights = blocks.position_weights(*pair)
    assert weights.dtype == torch.float32 and weights.shape == (pair[0],)
    assert weights[0] == 0
    assert weights[1:].tolist() == pytest.approx(PUBLISHED[pair], abs=5e-4)


def test_position_weights_of_the_third_published_pair():
    weights = blocks.position_weights(10, 5)
    assert weights[1] == 1 and weights[-1].item() == pytest.approx(0.202, abs=5e-4)


def test_an_infinite_gamma_is_no_decay():
    assert blocks.position_weights(5, math.inf).tolist() == [0, 1, 1, 1, 1]


@pytest.mark.parametrize("gamma", [1e-3, 1e-40, 1e-300])
def test_a_vanishing_gamma_leaves_only_the_first_drafted_slot(gamma):
    assert blocks.position_weights(4, gamma).tolist() == [0, 1, 0, 0]
    assert blocks.position_weights(4, gamma, first=0).tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("block_size, gamma", [(1, 4), (0, 4), (4, 0), (4, -1), (4, math.nan)])
def test_position_weights_refuse_what_makes_no_sense(block_size, gamma):
    with pytest.raises(ValueError):
        blocks.position_weights(block_size, gamma)


@pytest.mark.parametrize("seed", range(5))
def test_an_anchor_needs_a_supervised_label_in_its_first_drafted_slot(seed):
    _, supervised, lengths = corpus(seed)
    found = blocks.anchor_candidates(supervised, lengths)
    assert found.dtype == torch.bool
    assert [row.nonzero().flatten().tolist() for row in found] == candidates_by_loop(supervised, lengths)


def test_the_anchor_itself_needs_no_supervision():
    supervised = torch.tensor([[False, True, False]])
    assert blocks.anchor_candidates(supervised, torch.tensor([3])).tolist() == [[True, False, False]]


def test_a_sequence_of_one_token_has_no_anchor():
    assert not blocks.anchor_candidates(torch.ones(1, 1, dtype=torch.bool), torch.tensor([1])).any()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("block_size", [2, 5])
def test_a_fixed_cut_starts_a_block_at_every_bth_position_from_the_first_candidate(seed, block_size):
    _, supervised, lengths = corpus(seed)
    candidates = blocks.anchor_candidates(supervised, lengths)
    found = blocks.block_starts(candidates, block_size)
    for row, starts in zip(candidates.tolist(), found.tolist()):
        where = [a for a, is_one in enumerate(row) if is_one]
        expected = [a for a in where if (a - where[0]) % block_size == 0]
        assert [a for a, is_one in enumerate(starts) if is_one] == expected


@pytest.mark.parametrize("count", [1, 3, 50])
def test_sampled_anchors_are_sorted_distinct_candidates(count):
    _, supervised, lengths = corpus(1)
    candidates = blocks.anchor_candidates(supervised, lengths)
    anchors, valid = blocks.sample_anchors(candidates, count, [(0, n) for n in range(5)])
    assert anchors.shape == valid.shape == (5, count)
    assert anchors.dtype == torch.int64 and valid.dtype == torch.bool
    for row, ok, allowed in zip(anchors, valid, candidates_by_loop(supervised, lengths)):
        chosen = row[ok].tolist()
        assert chosen == sorted(set(chosen)) and set(chosen) <= set(allowed)
        assert len(chosen) == min(count, len(allowed))
        assert not ok[len(chosen) :].any() and not row[~ok].any()  # padding at the end, at position 0


def test_anchors_are_drawn_uniformly():
    candidates = torch.zeros(1, 9, dtype=torch.bool)
    candidates[0, [0, 2, 3, 5, 8]] = True
    draws = 4000
    pairs = Counter()
    for seed in range(draws):
        anchors, _ = blocks.sample_anchors(candidates, 2, [(7, seed)])
        pairs[tuple(anchors[0].tolist())] += 1
    assert len(pairs) == 10  # every pair of the five
    expected = draws / 10
    chi_squared = sum((seen - expected) ** 2 / expected for seen in pairs.values())
    assert chi_squared < 27.9  # 9 degrees of freedom, p = 0.001


def test_anchors_are_fresh_at_every_visit_and_repeat_with_their_seed():
    candidates = torch.ones(1, 200, dtype=torch.bool)
    first, again, later = (blocks.sample_anchors(candidates, 10, [(0, epoch, 5)])[0] for epoch in (0, 0, 1))
    assert first.equal(again)
    assert not first.equal(later)


def test_a_sequences_anchors_do_not_depend_on_its_batch():
    _, supervised, lengths = corpus(2)
    candidates = blocks.anchor_candidates(supervised, lengths)
    together, _ = blocks.sample_anchors(candidates, 4, [(3, n) for n in range(5)])
    wider = torch.nn.functional.pad(candidates, (0, 7), value=False)
    for n in range(5):
        alone, _ = blocks.sample_anchors(wider[n : n + 1], 4, [(3, n)])
        assert alone[0].equal(together[n])


def test_a_sequence_needs_a_seed_of_its_own():
    with pytest.raises(ValueError):
        blocks.sample_anchors(torch.ones(2, 4, dtype=torch.bool), 1, [(0,)])


@pytest.mark.parametrize("count", [1, 4, 7, 8, 20])
def test_evaluation_anchors_are_spread_and_always_the_same(count):
    candidates = torch.zeros(2, 40, dtype=torch.bool)
    candidates[0, 3:38:5] = True  # seven of them
    anchors, valid = blocks.spread_anchors(candidates, count)
    again, _ = blocks.spread_anchors(candidates, count)
    assert anchors.equal(again)
    chosen = anchors[0][valid[0]].tolist()
    allowed = list(range(3, 38, 5))
    assert len(chosen) == len(set(chosen)) == min(count, 7) and set(chosen) <= set(allowed)
    if count >= 7:
        assert chosen == allowed
    elif count > 1:
        gaps = np.diff([allowed.index(a) for a in chosen])
        assert (chosen[0], chosen[-1]) == (3, 33) and gaps.max() - gaps.min() <= 1
    assert not valid[1].any()  # no candidate, no anchor


@pytest.mark.parametrize("first", [1, 0], ids=["same", "next"])
@pytest.mark.parametrize("block_size", [2, 3, 8])
@pytest.mark.parametrize("seed", range(3))
def test_inputs_and_labels_equal_a_loop_over_slots(first, block_size, seed):
    ids, supervised, lengths = corpus(seed)
    candidates = blocks.anchor_candidates(supervised, lengths)
    anchors, valid = blocks.sample_anchors(candidates, 6, [(seed, n) for n in range(5)])
    tokens = blocks.block_tokens(ids, anchors, block_size, mask_token_id=99)
    positions = blocks.block_positions(anchors, block_size)
    labels, mask = blocks.block_labels(ids, supervised, lengths, anchors, valid, block_size, first)
    assert labels.dtype == torch.int64 and mask.dtype == torch.bool
    counted = 0
    for n in range(5):
        for j in range(6):
            a = int(anchors[n, j])
            for k in range(block_size):
                assert positions[n, j, k] == a + k
                assert tokens[n, j, k] == (ids[n, a] if k == 0 else 99)
                at = a + k + 1 - first
                counts = bool(valid[n, j]) and k >= first and at < lengths[n] and bool(supervised[n, at])
                assert bool(mask[n, j, k]) == counts
                assert labels[n, j, k] == (ids[n, at] if counts else 0)
                counted += counts
            assert not valid[n, j] or mask[n, j, first]  # an anchor's first drafted slot always counts
    assert counted == mask.sum() > 0


def test_a_block_may_stretch_past_the_end_with_its_labels_there_masked():
    ids, supervised = torch.tensor([[5, 6, 7, 8]]), torch.ones(1, 4, dtype=torch.bool)
    anchors, valid = torch.tensor([[1]]), torch.tensor([[True]])
    labels, mask = blocks.block_labels(ids, supervised, torch.tensor([3]), anchors, valid, 5)
    assert mask.tolist() == [[[False, True, False, False, False]]]
    assert labels[mask].tolist() == [7]


def test_an_unsupervised_hole_masks_only_its_own_label():
    ids, supervised = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[False, True, False, True]])
    labels, mask = blocks.block_labels(
        ids, supervised, torch.tensor([4]), torch.tensor([[0]]), torch.tensor([[True]]), 4
    )
    assert mask.tolist() == [[[False, True, False, True]]]
    assert labels[mask].tolist() == [6, 8]


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_visibility_equals_a_loop_over_queries_and_keys(block_size):
    anchors = torch.tensor([[0, 1, 4, 4], [6, 2, 7, 0]])  # in no order, twice the same, none before 0
    context = 7
    seen = blocks.visible(anchors, context, block_size)
    assert seen.dtype == torch.bool and seen.shape == (2, 4 * block_size, context + 4 * block_size)
    for n in range(2):
        for query in range(4 * block_size):
            mine = query // block_size
            for key in range(context + 4 * block_size):
                before_anchor = key < context and key < anchors[n, mine]
                in_block = key >= context and (key - context) // block_size == mine
                assert bool(seen[n, query, key]) == (before_anchor or in_block)


def test_visibility_with_no_context_is_the_blocks_own():
    seen = blocks.visible(torch.tensor([[0, 0]]), 0, 2)
    assert seen.int().tolist() == [[[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]]


def test_in_the_layout_next_the_decay_begins_at_the_anchors_slot():
    assert blocks.position_weights(7, 4.0, first=0).tolist() == pytest.approx([math.exp(-k / 4) for k in range(7)])
    assert blocks.position_weights(7, math.inf, first=0).tolist() == [1.0] * 7


def test_dynamic_weights_equal_a_loop_over_slots():
    """w_k = sum over m >= k of c_1 .. c_m, c = (1 + p) / 2; what is masked is 1 in a product and 0 in the sum."""
    generator = torch.Generator().manual_seed(0)
    probabilities = torch.rand(3, 4, 6, generator=generator, dtype=torch.float64)
    mask = torch.rand(3, 4, 6, generator=generator) < 0.7
    weights = blocks.dynamic_weights(probabilities, mask)
    for index in itertools.product(range(3), range(4)):
        p, counts = probabilities[index].tolist(), mask[index].tolist()
        for k in range(6):
            expected = 0.0
            for m in range(k, 6):
                if counts[m]:
                    expected += math.prod((1 + p[i]) / 2 for i in range(m + 1) if counts[i])
            assert weights[index][k].item() == pytest.approx(expected if counts[k] else 0.0, abs=1e-12)


def test_dynamic_weights_of_a_certain_draft_count_the_slots_still_to_come():
    weights = blocks.dynamic_weights(torch.ones(5), torch.tensor([False, True, True, True, True]))
    assert weights.tolist() == [0, 4, 3, 2, 1]
