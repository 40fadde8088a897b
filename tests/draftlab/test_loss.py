"""The loss against a plain loop with full logits in float64, and its gradient against autograd and differences."""

import math

import pytest
import torch

from draftlab import blocks
from draftlab.config import DISTILLED, LossConfig
from draftlab.errors import UserError
from draftlab.loss import TERMS, check_vocabulary, through_head

V, D = 23, 6
TERM_NAMES = ("ce", *TERMS)


def numerator(hidden, labels, weights, head, *, chunk=3, **options):
    """Weighted cross-entropy."""
    return through_head(hidden, labels, weights, head, LossConfig(chunk_rows=chunk), **options)[0]


def rows(count, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, D, generator=generator, dtype=torch.float64).to(dtype)
    head = torch.randn(V, D, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, V, (count,), generator=generator)
    weights = torch.rand(count, generator=generator) + 0.1
    return hidden, labels, weights, head


def teacher_of(hidden):
    """The target's states: others than the draft's, and not far from them."""
    noise = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return (hidden.detach().double() + 0.7 * noise).to(hidden.dtype)


def distribution(state, head, softcap=None):
    """Probabilities of one row, one logit after another."""
    logits = [sum(a * b for a, b in zip(state, row)) for row in head]
    if softcap is not None:
        logits = [softcap * math.tanh(z / softcap) for z in logits]
    best = max(logits)
    total = sum(math.exp(z - best) for z in logits)
    return [math.exp(z - best) / total for z in logits]


def kl(q, p):
    return sum(a * math.log(a / b) for a, b in zip(q, p) if a)


def term_by_loop(name, p, q, label, top_k=10, share=None):
    """One term of one row by its definition (contract, section 3); share fixes lk_hybrid's lambda."""
    alpha = sum(min(a, b) for a, b in zip(p, q))
    tv = sum(abs(a - b) for a, b in zip(p, q)) / 2
    likely = sorted(range(len(q)), key=lambda v: -q[v])[:top_k]
    some = sum(q[v] for v in likely)
    share = math.exp(-3 * alpha) if share is None else share
    return {
        "ce": lambda: -math.log(p[label]),
        "l1": lambda: 2 * tv,
        "tv": lambda: tv,
        "kl": lambda: kl(q, p),
        "reverse_kl": lambda: kl(p, q),
        "topk_kl": lambda: kl([q[v] / some for v in likely], [p[v] for v in likely]),
        "lk": lambda: -math.log(alpha),
        "lk_hybrid": lambda: share * kl(q, p) + (1 - share) * tv,
    }[name]()


def by_loop(hidden, labels, weights, head, softcap=None, mix=None, teacher=None, top_k=10):
    """Sum of w * loss, one row and one logit after another."""
    total, head = 0.0, head.tolist()
    teacher = hidden if teacher is None else teacher
    for h, t, label, w in zip(hidden.tolist(), teacher.tolist(), labels.tolist(), weights.tolist()):
        p, q = distribution(h, head, softcap), distribution(t, head, softcap)
        total += w * sum(x * term_by_loop(name, p, q, label, top_k) for name, x in (mix or {"ce": 1.0}).items())
    return total


def plain(hidden, labels, weights, head, softcap=None):
    logits = hidden @ head.T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return (weights * torch.nn.functional.cross_entropy(logits, labels, reduction="none")).sum()


# ---- cross-entropy


@pytest.mark.parametrize("softcap", [None, 2.0, 30.0])
@pytest.mark.parametrize("chunk", [1, 4, 7, 10, 64])
def test_the_numerator_equals_a_loop_with_full_logits(chunk, softcap):
    hidden, labels, weights, head = rows(10)
    found = numerator(hidden, labels, weights, head, softcap=softcap, chunk=chunk)
    assert found.item() == pytest.approx(by_loop(hidden, labels, weights, head, softcap), rel=1e-9)


def fused_cross_entropy(hidden, labels, weights, head, chunk):
    """What cross-entropy alone has always been, to the last bit: total and gradient."""
    total, gradient = torch.zeros(()), torch.empty_like(hidden)
    for start in range(0, len(hidden), chunk):
        part = slice(start, start + chunk)
        logits = hidden[part] @ head.T
        for z, label, weight in zip(*(x.split(32) for x in (logits, labels[part, None], weights[part, None]))):
            picked, p = z.gather(1, label).float(), z.softmax(1, dtype=torch.float32)
            loss = z.amax(1, keepdim=True).float() - p.amax(1, keepdim=True).log() - picked
            total += (weight * loss).sum()
            z.copy_(p.scatter_add_(1, label, torch.full_like(picked, -1.0)).mul_(weight))
        gradient[part] = logits @ head
    return total, gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy_alone_is_bit_for_bit_what_it_was_before_there_were_other_terms(dtype):
    hidden, labels, weights, head = rows(150, dtype=dtype)
    total, gradient = fused_cross_entropy(hidden, labels, weights, head, chunk=64)
    hidden.requires_grad_()
    found = numerator(hidden, labels, weights, head, chunk=64)
    found.backward()
    assert found.equal(total) and hidden.grad.equal(gradient)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("chunk", [1, 4, 10, 64])
def test_the_gradient_is_that_of_the_plain_form(chunk, softcap):
    hidden, labels, weights, head = rows(10)
    ours, theirs = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    (3.5 * numerator(ours, labels, weights, head, softcap=softcap, chunk=chunk)).backward()
    (3.5 * plain(theirs, labels, weights, head, softcap)).backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-9)


def test_the_head_gets_no_gradient():
    hidden, labels, weights, head = rows(4)
    head.requires_grad_()
    numerator(hidden.requires_grad_(), labels, weights, head).backward()
    assert head.grad is None and hidden.grad.abs().sum() > 0


def test_no_row_gives_nothing_and_no_nan():
    hidden, labels, weights, head = rows(0)
    hidden.requires_grad_()
    found = numerator(hidden, labels, weights, head)
    found.backward()
    assert (found.item(), hidden.grad.shape) == (0.0, (0, D))


def test_a_row_of_weight_zero_adds_nothing():
    hidden, labels, weights, head = rows(5)
    weights[2] = 0
    hidden.requires_grad_()
    found = numerator(hidden, labels, weights, head, chunk=2)
    found.backward()
    keep = [0, 1, 3, 4]
    torch.testing.assert_close(found, numerator(hidden[keep], labels[keep], weights[keep], head))
    assert not hidden.grad[2].any()


def test_numerators_add_up_over_any_partition():
    hidden, labels, weights, head = rows(11)
    whole = numerator(hidden, labels, weights, head)
    parts = [numerator(hidden[i::3], labels[i::3], weights[i::3], head) for i in range(3)]
    assert sum(part.item() for part in parts) == pytest.approx(whole.item(), rel=1e-9)


def test_large_logits_stay_finite():
    hidden, labels, weights, head = rows(6, dtype=torch.float32)
    hidden = (1e3 * hidden).requires_grad_()
    found = numerator(hidden, labels, weights, head)
    found.backward()
    assert found.item() == pytest.approx(by_loop_in_float64(hidden, labels, weights, head), rel=1e-5)
    assert hidden.grad.isfinite().all()


def by_loop_in_float64(hidden, labels, weights, head):
    return plain(hidden.detach().double(), labels, weights.double(), head.double()).item()


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_bfloat16_states_and_head_come_near_the_float32_result(softcap):
    hidden, labels, weights, head = rows(40, dtype=torch.bfloat16)
    low = hidden.clone().requires_grad_()
    found = numerator(low, labels, weights, head, softcap=softcap, chunk=7)
    found.backward()
    high = hidden.float().requires_grad_()
    reference = plain(high, labels, weights, head.float(), softcap)
    reference.backward()
    assert low.grad.dtype == torch.bfloat16 and found.dtype == torch.float32
    assert found.item() == pytest.approx(reference.item(), rel=0.01)
    error = (low.grad.float() - high.grad).norm() / high.grad.norm()
    assert error < 0.02


def test_the_softmax_is_float32_even_when_everything_is_bfloat16():
    """Many equal logits: a bfloat16 sum stops growing at 256, a float32 one doesn't."""
    hidden = torch.zeros(1, D, dtype=torch.bfloat16)
    found = numerator(hidden, torch.tensor([0]), torch.ones(1), torch.zeros(5000, D, dtype=torch.bfloat16))
    assert found.item() == pytest.approx(math.log(5000), rel=1e-5)


@pytest.mark.parametrize("block_size", [2, 8, 16])
@pytest.mark.parametrize("gamma", [0.5, 4.0, math.inf])
def test_neither_gamma_nor_block_size_rescales_the_loss(block_size, gamma):
    """Where every slot is equally hard, the normalised loss is that hardness, whatever the weights."""
    hidden, labels, _, head = rows(1)
    slots = block_size - 1
    weights = blocks.position_weights(block_size, gamma)[1:].repeat(3)
    found = numerator(hidden.expand(3 * slots, D), labels.expand(3 * slots), weights, head)
    expected = plain(hidden, labels, torch.ones(1), head).item()
    assert (found / weights.sum()).item() == pytest.approx(expected, rel=1e-5)


def test_the_decay_moves_weight_to_the_early_slots():
    hidden, labels, _, head = rows(7)
    hidden[1:] *= 0  # the first slot is hard, the others are log V
    weights = [blocks.position_weights(8, gamma)[1:] for gamma in (1.0, math.inf)]
    fast, none = ((numerator(hidden, labels, w, head) / w.sum()).item() for w in weights)
    first, rest = plain(hidden[:1], labels[:1], torch.ones(1), head).item(), math.log(V)
    total = sum(math.exp(-k) for k in range(7))
    assert fast == pytest.approx((first + rest * (total - 1)) / total, rel=1e-5)
    assert none == pytest.approx((first + rest * 6) / 7, rel=1e-5)


# ---- the other terms, and mixes


def only(name, **options):
    """A loss of one term."""
    return LossConfig(**{"ce": 0.0, name: 1.0, "top_k": 4, "chunk_rows": 3, **options})


def test_the_config_names_every_term_and_no_other():
    assert tuple(TERMS) == DISTILLED and set(TERM_NAMES) <= set(LossConfig.model_fields)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("name", TERM_NAMES)
def test_a_term_equals_a_loop_over_the_vocabulary(name, softcap):
    hidden, labels, weights, head = rows(8)
    teacher = teacher_of(hidden)
    found, terms, _ = through_head(hidden, labels, weights, head, only(name), teacher=teacher, softcap=softcap)
    expected = by_loop(hidden, labels, weights, head, softcap, {name: 1.0}, teacher, top_k=4)
    assert found.item() == pytest.approx(expected, rel=1e-9)
    assert (weights * terms[:, -1]).sum().item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("name", TERM_NAMES)
def test_a_terms_gradient_is_what_differences_say(name, softcap):
    hidden, labels, weights, head = rows(2)
    teacher, cap = teacher_of(hidden), softcap
    hidden.requires_grad_()
    through_head(hidden, labels, weights, head, only(name), teacher=teacher, softcap=cap)[0].backward()
    ends, step = head.tolist(), 1e-5
    for r in range(2):
        q = distribution(teacher[r].tolist(), ends, cap)
        here = distribution(hidden[r].tolist(), ends, cap)
        share = math.exp(-3 * sum(map(min, here, q)))  # lk_hybrid's is a constant to the gradient
        for d in range(D):
            around = []
            for sign in (1, -1):
                state = hidden[r].tolist()
                state[d] += sign * step
                around.append(term_by_loop(name, distribution(state, ends, cap), q, int(labels[r]), 4, share))
            slope = weights[r].item() * (around[0] - around[1]) / (2 * step)
            assert hidden.grad[r, d].item() == pytest.approx(slope, rel=1e-6, abs=1e-7)


MIX = {"ce": 0.1, "l1": 0.9, "kl": 0.3, "lk": 0.5, "topk_kl": 0.2}


@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_a_mix_is_the_weighted_sum_of_its_terms_and_so_is_its_gradient(chunk):
    hidden, labels, weights, head = rows(10)
    teacher = teacher_of(hidden)
    config = LossConfig(**MIX, top_k=4, chunk_rows=chunk)
    mixed = hidden.clone().requires_grad_()
    total, terms, _ = through_head(mixed, labels, weights, head, config, teacher=teacher)
    total.backward()
    expected, gradient = 0.0, torch.zeros_like(hidden)
    for name, weight in MIX.items():
        alone = hidden.clone().requires_grad_()
        value, _, _ = through_head(alone, labels, weights, head, only(name), teacher=teacher)
        value.backward()
        place = ["ce", *config.distilled].index(name)
        assert (weights * terms[:, place]).sum().item() == pytest.approx(value.item(), rel=1e-9)
        expected += weight * value.item()
        gradient += weight * alone.grad
    assert total.item() == pytest.approx(expected, rel=1e-9) and not terms.requires_grad
    torch.testing.assert_close(mixed.grad, gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", TERM_NAMES)
def test_bfloat16_inputs_give_the_float32_result(name):
    """Up to the rounding of the logits, which are the head's own."""
    hidden, labels, weights, head = rows(40, dtype=torch.bfloat16)
    teacher, results = teacher_of(hidden), []
    for dtype in (torch.bfloat16, torch.float32):
        states = hidden.to(dtype, copy=True).requires_grad_()
        value, _, _ = through_head(states, labels, weights, head.to(dtype), only(name), teacher=teacher.to(dtype))
        value.backward()
        assert value.dtype == torch.float32
        results.append((value.item(), states.grad.float()))
    (low, ours), (high, theirs) = results
    assert low == pytest.approx(high, rel=0.01)
    assert (ours - theirs).norm() / theirs.norm() < 0.03


@pytest.mark.parametrize("name", TERMS)
def test_a_draft_that_is_the_target_has_no_divergence_and_one_that_is_far_off_a_finite_one(name):
    hidden, labels, weights, head = rows(6, dtype=torch.float32)
    same, _, _ = through_head(hidden, labels, weights, head, only(name, top_k=V), teacher=hidden)
    assert same.item() == pytest.approx(0.0, abs=1e-5)
    far = (1e3 * hidden).requires_grad_()
    value, _, _ = through_head(far, labels, weights, head, only(name), teacher=-1e3 * hidden)
    value.backward()
    assert value.isfinite() and value > 0 and far.grad.isfinite().all()


@pytest.mark.parametrize("mix", [{}, MIX])
def test_factors_that_follow_the_cross_entropy_are_constants_to_the_gradient(mix):
    hidden, labels, weights, head = rows(10)
    config, teacher = LossConfig(**mix, chunk_rows=4), teacher_of(hidden)
    ours, theirs = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    dynamic = lambda ce: (-ce).exp()  # noqa: E731
    loss, terms, found = through_head(ours, labels, weights, head, config, teacher=teacher, reweigh=dynamic)
    loss.backward()
    known = (hidden @ head.T).softmax(1).gather(1, labels[:, None])[:, 0]
    expected, same, _ = through_head(theirs, labels, weights * known, head, config, teacher=teacher)
    expected.backward()
    torch.testing.assert_close(found, weights * known, rtol=1e-9, atol=0)
    torch.testing.assert_close((loss, terms, ours.grad), (expected, same, theirs.grad), rtol=1e-9, atol=1e-12)


def test_more_top_tokens_than_the_vocabulary_has_are_refused():
    check_vocabulary(LossConfig(topk_kl=1.0, top_k=V), V)
    check_vocabulary(LossConfig(top_k=V + 1), V)
    with pytest.raises(UserError, match=f"loss.top_k.* {V} .*{V + 1}"):
        check_vocabulary(LossConfig(topk_kl=1.0, top_k=V + 1), V)


def test_a_correction_of_the_logits_is_differentiated_too():
    hidden, labels, weights, head = rows(10)
    generator, config = torch.Generator().manual_seed(3), LossConfig(**MIX, top_k=4, chunk_rows=4)
    latent, markov = (torch.randn(n, 2, generator=generator, dtype=torch.float64) for n in (10, V))
    for x in (hidden, latent, markov):
        x.requires_grad_()
    given = dict(teacher=teacher_of(hidden), softcap=5.0)
    found, terms, _ = through_head(hidden, labels, weights, head, config, latent=latent, markov=markov, **given)
    found.backward()
    joined, both = torch.cat([hidden, latent], 1).detach(), torch.cat([head, markov.detach()], 1)
    states = joined.requires_grad_()
    given["teacher"] = torch.cat([given["teacher"], torch.zeros_like(latent.detach())], 1)
    expected, same, _ = through_head(states, labels, weights, both, config, **given)
    expected.backward()
    torch.testing.assert_close((found, terms), (expected, same), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(torch.cat([hidden.grad, latent.grad], 1), states.grad, rtol=1e-9, atol=1e-12)
    step = 1e-6
    for v, r in ((0, 0), (7, 1), (V - 1, 0)):
        values, states = [], (hidden.detach(), labels, weights, head, config)
        given = dict(teacher=teacher_of(hidden), softcap=5.0, latent=latent.detach())
        for sign in (1, -1):
            moved = markov.detach().clone()
            moved[v, r] += sign * step
            values.append(through_head(*states, markov=moved, **given)[0].item())
        slope = (values[0] - values[1]) / (2 * step)
        assert markov.grad[v, r].item() == pytest.approx(slope, rel=1e-5, abs=1e-7)
