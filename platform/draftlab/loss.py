"""The loss as (numerator, denominator); reduced once, over everything, by the training loop."""

from __future__ import annotations

import torch
from torch import Tensor

SOFTMAX_ROWS = 32
"""Rows of float32 probabilities at once; for a vocabulary of 49,152, 16 to 64 ran alike and 256 four times slower."""


class _HeadCrossEntropy(torch.autograd.Function):
    """Cross-entropy through a frozen head, a few rows at a time.

    The head gets no gradient, so the gradient of the rows is known as soon as their logits are: both of the
    head's products are done in the forward pass, and no more than `chunk` rows of logits ever exist. The products
    want many rows at once, the softmax few, so that its float32 values stay in the processor's cache.
    """

    @staticmethod
    def forward(ctx, hidden, labels, weights, head, softcap, chunk):  # noqa: D102
        total = hidden.new_zeros((), dtype=torch.float32)
        gradient = torch.empty_like(hidden)
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            logits = hidden[rows] @ head.T
            for piece in range(0, len(logits), SOFTMAX_ROWS):
                part = slice(piece, piece + SOFTMAX_ROWS)
                z, label, weight = logits[part], labels[rows][part, None], weights[rows][part, None]
                total += (weight * _differentiate(z, label, weight, softcap)).sum()
            gradient[rows] = logits @ head
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx, upstream):  # noqa: D102
        (gradient,) = ctx.saved_tensors
        return gradient * upstream.to(gradient.dtype), None, None, None, None, None


def _differentiate(logits: Tensor, labels: Tensor, weights: Tensor, softcap: float | None) -> Tensor:
    """Cross-entropy (R, 1) of logits (R, V), which become their own gradient: w (softmax - onehot)."""
    capped = logits if softcap is None else softcap * torch.tanh(logits.float() / softcap)
    picked = capped.gather(1, labels).float()
    probabilities = capped.softmax(dim=1, dtype=torch.float32)
    # log sum exp, from the likeliest token: its probability is never so small that its logarithm is lost.
    normaliser = capped.amax(1, keepdim=True).float() - probabilities.amax(1, keepdim=True).log()
    loss = normaliser - picked
    probabilities.scatter_add_(1, labels, torch.full_like(picked, -1.0)).mul_(weights)
    if softcap is not None:
        probabilities.mul_(1 - (capped / softcap) ** 2)
    logits.copy_(probabilities)
    return loss


def cross_entropy(
    hidden: Tensor, labels: Tensor, weights: Tensor, head: Tensor, *, softcap: float | None = None, chunk: int
) -> tuple[Tensor, Tensor]:
    """Weighted cross-entropy of hidden states through a frozen head.

    Args:
        hidden: (R, D) the draft's final-normed states at slots that count, in the head's dtype.
        labels: (R,) int64.
        weights: (R,) float32, each slot's position weight.
        head: (V, D), frozen.
        softcap: the target's logit soft cap, if it has one.
        chunk: rows whose logits exist at once.

    Returns:
        (numerator, denominator), float32 scalars: sum of w * CE in float32, and sum of w. No row gives (0, 0).
    """
    numerator = _HeadCrossEntropy.apply(hidden, labels, weights, head, softcap, chunk)
    return numerator, weights.sum()
