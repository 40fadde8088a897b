"""The loss against a plain loop with full logits in float64, and its gradient against autograd and differences."""

import math

import pytest
import torch

from draftlab import blocks
from draftlab.loss import cross_entropy as _cross_entropy

V, D = 23, 6


def cross_entropy(*args, chunk=3, **options):
    return _cross_entropy(*args, chunk=chunk, **options)


def rows(count, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, D, generator=generator, dtype=torch.float64).to(dtype)
    head = torch.randn(V, D, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, V, (count,), generator=generator)
    weights = torch.rand(count, generator=generator) + 0.1
    return hidden, labels, weights, head


def by_loop(hidden, labels, weights, head, softcap=None):
    """Sum of w * CE and sum of w, one row and one logit after another."""
    numerator = denominator = 0.0
    for h, label, w in zip(hidden.tolist(), labels.tolist(), weights.tolist()):
        logits = [sum(a * b for a, b in zip(h, row)) for row in head.tolist()]
        if softcap is not None:
            logits = [softcap * math.tanh(z / softcap) for z in logits]
        numerator += w * (math.log(sum(math.exp(z) for z in logits)) - logits[label])
        denominator += w
    return numerator, denominator


def plain(hidden, labels, weights, head, softcap=None):
    logits = hidden @ head.T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return (weights * torch.nn.functional.cross_entropy(logits, labels, reduction="none")).sum()


@pytest.mark.parametrize("softcap", [None, 2.0, 30.0])
@pytest.mark.parametrize("chunk", [1, 4, 7, 10, 64])
def test_numerator_and_denominator_equal_a_loop_with_full_logits(chunk, softcap):
    hidden, labels, weights, head = rows(10)
    numerator, denominator = cross_entropy(hidden, labels, weights, head, softcap=softcap, chunk=chunk)
    expected = by_loop(hidden, labels, weights, head, softcap)
    assert numerator.dtype == denominator.dtype == torch.float32
    assert (numerator.item(), denominator.item()) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("chunk", [1, 4, 10, 64])
def test_the_gradient_is_that_of_the_plain_form(chunk, softcap):
    hidden, labels, weights, head = rows(10)
    ours, theirs = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    (3.5 * cross_entropy(ours, labels, weights, head, softcap=softcap, chunk=chunk)[0]).backward()
    (3.5 * plain(theirs, labels, weights, head, softcap)).backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_gradient_is_what_differences_say(softcap):
    hidden, labels, weights, head = rows(3)
    hidden.requires_grad_()
    cross_entropy(hidden, labels, weights, head, softcap=softcap, chunk=2)[0].backward()
    step = 1e-5
    for r in range(3):
        for d in range(D):
            nudged = [hidden.detach().clone() for _ in range(2)]
            nudged[0][r, d] += step
            nudged[1][r, d] -= step
            up, down = (by_loop(x, labels, weights, head, softcap)[0] for x in nudged)
            assert hidden.grad[r, d].item() == pytest.approx((up - down) / (2 * step), rel=1e-4, abs=1e-5)


def test_the_head_gets_no_gradient():
    hidden, labels, weights, head = rows(4)
    head.requires_grad_()
    cross_entropy(hidden.requires_grad_(), labels, weights, head)[0].backward()
    assert head.grad is None and hidden.grad.abs().sum() > 0


def test_no_row_gives_nothing_and_no_nan():
    hidden, labels, weights, head = rows(0)
    hidden.requires_grad_()
    numerator, denominator = cross_entropy(hidden, labels, weights, head)
    numerator.backward()
    assert (numerator.item(), denominator.item(), hidden.grad.shape) == (0.0, 0.0, (0, D))


def test_a_row_of_weight_zero_adds_nothing():
    hidden, labels, weights, head = rows(5)
    weights[2] = 0
    hidden.requires_grad_()
    numerator, denominator = cross_entropy(hidden, labels, weights, head, chunk=2)
    numerator.backward()
    keep = [0, 1, 3, 4]
    expected = cross_entropy(hidden[keep], labels[keep], weights[keep], head)
    torch.testing.assert_close((numerator, denominator), expected)
    assert not hidden.grad[2].any()


def test_numerators_and_denominators_add_up_over_any_partition():
    hidden, labels, weights, head = rows(11)
    whole = cross_entropy(hidden, labels, weights, head)
    parts = [cross_entropy(hidden[i::3], labels[i::3], weights[i::3], head) for i in range(3)]
    for k in range(2):
        assert sum(part[k].item() for part in parts) == pytest.approx(whole[k].item(), rel=1e-6)


def test_large_logits_stay_finite():
    hidden, labels, weights, head = rows(6, dtype=torch.float32)
    hidden = (1e3 * hidden).requires_grad_()
    numerator, _ = cross_entropy(hidden, labels, weights, head)
    numerator.backward()
    assert numerator.item() == pytest.approx(by_loop_in_float64(hidden, labels, weights, head), rel=1e-5)
    assert hidden.grad.isfinite().all()


def by_loop_in_float64(hidden, labels, weights, head):
    return plain(hidden.detach().double(), labels, weights.double(), head.double()).item()


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_bfloat16_states_and_head_come_near_the_float32_result(softcap):
    hidden, labels, weights, head = rows(40, dtype=torch.bfloat16)
    low = hidden.clone().requires_grad_()
    numerator, _ = cross_entropy(low, labels, weights, head, softcap=softcap, chunk=7)
    numerator.backward()
    high = hidden.float().requires_grad_()
    reference = plain(high, labels, weights, head.float(), softcap)
    reference.backward()
    assert low.grad.dtype == torch.bfloat16 and numerator.dtype == torch.float32
    assert numerator.item() == pytest.approx(reference.item(), rel=0.01)
    error = (low.grad.float() - high.grad).norm() / high.grad.norm()
    assert error < 0.02


def test_the_softmax_is_float32_even_when_everything_is_bfloat16():
    """Many equal logits: a bfloat16 sum stops growing at 256, a float32 one doesn't."""
    hidden = torch.zeros(1, D, dtype=torch.bfloat16)
    numerator, _ = cross_entropy(hidden, torch.tensor([0]), torch.ones(1), torch.zeros(5000, D, dtype=torch.bfloat16))
    assert numerator.item() == pytest.approx(math.log(5000), rel=1e-5)


@pytest.mark.parametrize("block_size", [2, 8, 16])
@pytest.mark.parametrize("gamma", [0.5, 4.0, math.inf])
def test_neither_gamma_nor_block_size_rescales_the_loss(block_size, gamma):
    """Where every slot is equally hard, the normalised loss is that hardness, whatever the weights."""
    hidden, labels, _, head = rows(1)
    slots = block_size - 1
    weights = blocks.position_weights(block_size, gamma)[1:].repeat(3)
    numerator, denominator = cross_entropy(hidden.expand(3 * slots, D), labels.expand(3 * slots), weights, head)
    expected = plain(hidden, labels, torch.ones(1), head).item()
    assert (numerator / denominator).item() == pytest.approx(expected, rel=1e-5)


def test_the_decay_moves_weight_to_the_early_slots():
    hidden, labels, _, head = rows(7)
    hidden[1:] *= 0  # the first slot is hard, the others are log V
    weights = [blocks.position_weights(8, gamma)[1:] for gamma in (1.0, math.inf)]
    fast, none = ((n / d).item() for n, d in (cross_entropy(hidden, labels, w, head) for w in weights))
    first, rest = plain(hidden[:1], labels[:1], torch.ones(1), head).item(), math.log(V)
    total = sum(math.exp(-k) for k in range(7))
    assert fast == pytest.approx((first + rest * (total - 1)) / total, rel=1e-5)
    assert none == pytest.approx((first + rest * 6) / 7, rel=1e-5)
