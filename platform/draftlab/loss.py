"""The loss through the target's frozen head: terms, their mix, and its gradient.

Shapes: R rows (slots that count), V vocabulary. p is the draft's probability, q the target's.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor

from draftlab.config import LossConfig
from draftlab.errors import UserError

SOFTMAX_ROWS = 32
"""Rows of float32 probabilities at once on a CPU; for a vocabulary of 49,152, 16 to 64 ran alike and 256 four times
slower. A GPU has no such cache, and a price for every call: there they are `chunk_rows`."""

LK_SHARPNESS = 3.0
"""How fast lk_hybrid turns from KL to TV as the acceptance rises; as published."""


class Rows(NamedTuple):
    """Both models' distributions over some rows, each (R, V)."""

    log_p: Tensor
    p: Tensor
    log_q: Tensor
    q: Tensor
    top_k: int
    """K of the top-K KL."""


def _l1(rows: Rows) -> tuple[Tensor, Tensor]:
    difference = rows.p - rows.q
    return difference.abs().sum(1), rows.p * difference.sign()


def _tv(rows: Rows) -> tuple[Tensor, Tensor]:
    value, score = _l1(rows)
    return value / 2, score / 2


def _kl(rows: Rows) -> tuple[Tensor, Tensor]:
    return (rows.q * (rows.log_q - rows.log_p)).sum(1), -rows.q


def _reverse_kl(rows: Rows) -> tuple[Tensor, Tensor]:
    score = rows.p * (rows.log_p - rows.log_q)
    return score.sum(1), score


def _topk_kl(rows: Rows) -> tuple[Tensor, Tensor]:
    top, ids = rows.log_q.topk(rows.top_k, dim=1)
    log_q = top.log_softmax(1)
    value = (log_q.exp() * (log_q - rows.log_p.gather(1, ids))).sum(1)
    return value, torch.zeros_like(rows.q).scatter_(1, ids, -log_q.exp())


def _acceptance(rows: Rows) -> Tensor:
    """(R,) alpha, the probability that rejection sampling accepts; never quite 0, so that it has a logarithm."""
    return torch.minimum(rows.p, rows.q).sum(1).clamp_min(torch.finfo(torch.float32).tiny)


def _lk(rows: Rows) -> tuple[Tensor, Tensor]:
    alpha = _acceptance(rows)
    return -alpha.log(), -rows.p * (rows.p < rows.q) / alpha[:, None]


def _lk_hybrid(rows: Rows) -> tuple[Tensor, Tensor]:
    share = torch.exp(-LK_SHARPNESS * _acceptance(rows))  # a constant to the gradient
    (kl, to_kl), (tv, to_tv) = _kl(rows), _tv(rows)
    return share * kl + (1 - share) * tv, share[:, None] * to_kl + (1 - share[:, None]) * to_tv


TERMS: dict[str, Callable[[Rows], tuple[Tensor, Tensor]]] = {
    "l1": _l1, "tv": _tv, "kl": _kl, "reverse_kl": _reverse_kl, "topk_kl": _topk_kl, "lk": _lk, "lk_hybrid": _lk_hybrid,
}  # fmt: skip
"""Terms against the target's distribution: rows -> value (R,) and its derivative by log p (R, V), up to multiples of p.

Sources: l1 and tv, the DSpark paper; lk and lk_hybrid, the LK losses (-log of the acceptance, and KL fading into TV).
"""


class _ThroughHead(torch.autograd.Function):
    """A mix of terms through a frozen head, a few rows at a time.

    The head gets no gradient, so the gradient of the rows is known as soon as their logits are: all of the head's
    products are done in the forward pass, and no more than `chunk_rows` rows of logits ever exist. The products want
    many rows at once, the softmax few, so that its float32 values stay in the processor's cache.
    """

    @staticmethod
    def forward(ctx, hidden, latent, markov, labels, weights, head, config, teacher, softcap, reweigh):  # noqa: D102
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        weights, distilled = weights.to(dtype), config.distilled
        mix = torch.tensor([config.ce, *distilled.values()], dtype=dtype, device=hidden.device)[:, None]
        total = hidden.new_zeros((), dtype=dtype)
        terms = hidden.new_empty((len(hidden), len(mix)), dtype=dtype)
        gradient = torch.empty_like(hidden)
        if latent is not None:
            to_latent, to_markov = torch.empty_like(latent), torch.zeros_like(markov, dtype=dtype)
        few = SOFTMAX_ROWS if hidden.device.type == "cpu" else config.chunk_rows
        for start in range(0, len(hidden), config.chunk_rows):
            rows = slice(start, start + config.chunk_rows)
            logits = hidden[rows] @ head.T
            if latent is not None:
                logits += latent[rows] @ markov.T
            answers = (teacher[rows] @ head.T).split(few) if distilled else repeat(None)
            pieces = (x.split(few) for x in (logits, labels[rows, None], weights[rows, None], terms[rows]))
            for *piece, values, answer in zip(*pieces, answers):
                values.copy_(_differentiate(*piece, answer, config, softcap))
                total += (piece[-1] * (values @ mix)).sum()
            gradient[rows] = logits @ head
            if latent is not None:
                to_latent[rows] = logits @ markov
                to_markov += logits.T @ latent[rows]
        if reweigh is not None:
            factors = reweigh(terms[:, 0])
            weights = weights * factors
            gradient.mul_(factors[:, None])
            total = (weights[:, None] * (terms @ mix)).sum()
        gradients = (gradient,) if latent is None else (gradient, to_latent, to_markov.to(markov.dtype))
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(terms, weights)
        return total, terms, weights

    @staticmethod
    def backward(ctx, upstream, *_):  # noqa: D102
        gradients = [gradient * upstream.to(gradient.dtype) for gradient in ctx.saved_tensors]
        return *gradients, *repeat(None, 10 - len(gradients))


def _differentiate(
    logits: Tensor, labels: Tensor, weights: Tensor, answers: Tensor | None, config: LossConfig, softcap: float | None
) -> Tensor:
    """The terms (R, 1 + distilled) of logits (R, V), which become the gradient of their weighted sum.

    Cross-entropy gives w (softmax - onehot); a term with derivative s by log p gives w (s - p sum(s)).
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    capped = logits if softcap is None else softcap * torch.tanh(logits.to(dtype) / softcap)
    picked = capped.gather(1, labels).to(dtype)
    p = capped.softmax(dim=1, dtype=dtype)
    # log sum exp, from the likeliest token: its probability is never so small that its logarithm is lost.
    normaliser = capped.amax(1, keepdim=True).to(dtype) - p.amax(1, keepdim=True).log()
    values, scores = [normaliser - picked], None
    if answers is not None:
        answers = answers if softcap is None else softcap * torch.tanh(answers.to(dtype) / softcap)
        log_q = answers.log_softmax(dim=1, dtype=dtype)
        rows = Rows(capped.to(dtype) - normaliser, p, log_q, log_q.exp(), config.top_k)
        found = [(weight, *TERMS[name](rows)) for name, weight in config.distilled.items()]
        values += [value[:, None] for _, value, _ in found]
        scores = sum(weight * score for weight, _, score in found)
        scores.addcmul_(p, scores.sum(1, keepdim=True), value=-1)
    p.scatter_add_(1, labels, torch.full_like(picked, -1.0)).mul_(config.ce * weights)
    if scores is not None:
        p.addcmul_(scores, weights)
    if softcap is not None:
        p.mul_(1 - (capped / softcap) ** 2)
    logits.copy_(p)
    return torch.cat(values, dim=1)


def through_head(
    hidden: Tensor, labels: Tensor, weights: Tensor, head: Tensor, config: LossConfig, *, teacher: Tensor | None = None,
    softcap: float | None = None, reweigh: Callable[[Tensor], Tensor] | None = None,
    latent: Tensor | None = None, markov: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The weighted sum of a mix of terms for hidden states, through a frozen head.

    Probabilities, terms and sums are float32 (float64 for float64 states), from logits of the head's own precision,
    which are those that the target decodes with.

    Args:
        hidden: (R, D) the draft's final-normed states at slots that count, in the head's dtype.
        labels: (R,) int64.
        weights: (R,) float32, each slot's position weight.
        head: (V, D), frozen.
        config: the mix; `chunk_rows` rows of logits exist at once.
        teacher: (R, D) the target's final-normed states one position before each label, where the mix has distilled
            terms; its distribution is taken over the same head.
        softcap: the target's logit soft cap, if it has one.
        reweigh: cross-entropies (R,) -> factors (R,) of the weights, constants to the gradient (see
            blocks.dynamic_weights). Not together with a correction.
        latent, markov: (R, r) and (V, r), a correction of the logits: latent @ markov.T is added. Both get gradients.

    Returns:
        The numerator, a scalar: sum over rows of w * (sum of the mix). And, without gradient, each row's terms
        (R, 1 + distilled), cross-entropy first, and weight w (R,).
    """
    return _ThroughHead.apply(hidden, latent, markov, labels, weights, head, config, teacher, softcap, reweigh)


def check_vocabulary(config: LossConfig, vocab_size: int) -> None:
    """Refuse a mix that the target's vocabulary is too small for.

    Raises:
        UserError: naming the setting.
    """
    if config.topk_kl and config.top_k > vocab_size:
        raise UserError(f"loss.top_k: expected at most the vocabulary's {vocab_size} tokens, got {config.top_k}")
