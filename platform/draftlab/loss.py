"""The loss as (numerator, denominator); reduced once, over everything, by the training loop."""

from __future__ import annotations

import torch
from torch import Tensor


class _HeadCrossEntropy(torch.autograd.Function):
    """Cross-entropy through a frozen head, a few rows at a time.

    The head gets no gradient, so the gradient of the rows is known as soon as their logits are: both of the
    head's products are done in the forward pass, and no more than `chunk` rows of logits ever exist.
    """

    @staticmethod
    def forward(ctx, hidden, labels, weights, head, softcap, chunk):  # noqa: D102
        total = hidden.new_zeros((), dtype=torch.float32)
        gradient = torch.empty_like(hidden)
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            logits = (hidden[rows] @ head.T).float()
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
                slope = 1 - (logits / softcap) ** 2
            picked = logits.gather(1, labels[rows, None]).squeeze(1)
            normaliser = torch.logsumexp(logits, dim=1)
            total += (weights[rows] * (normaliser - picked)).sum()
            # From here `logits` becomes the gradient by the logits, in place: w (softmax - onehot).
            logits.sub_(normaliser[:, None]).exp_()
            logits[torch.arange(len(picked)), labels[rows]] -= 1.0
            logits.mul_(weights[rows, None])
            if softcap is not None:
                logits.mul_(slope)
            gradient[rows] = logits.to(head.dtype) @ head
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx, upstream):  # noqa: D102
        (gradient,) = ctx.saved_tensors
        return gradient * upstream.to(gradient.dtype), None, None, None, None, None


def cross_entropy(
    hidden: Tensor, labels: Tensor, weights: Tensor, head: Tensor, *, softcap: float | None = None, chunk: int = 128
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
