"""Anchors, block inputs, labels and visibility. Pure functions.

Shapes: N sequences, S context tokens, A anchors per sequence, B block size.
A block is [token at a, MASK x (B-1)] at positions a..a+B-1. Its first drafted slot, which predicts the token at a+1, is
slot 1 in the layout `same` (slot k predicts the token at a+k) and slot 0 in `next` (the token at a+k+1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

DPACE_FLOOR = 0.5
"""s of D-PACE: what an impossible token counts as; as published."""


def position_weights(block_size: int, gamma: float, first: int = 1) -> Tensor:
    """Weight of each slot of a block: 0 before the first drafted slot, then exp(-(k-first)/gamma).

    Args:
        block_size: B, tokens in a block, the anchor included; at least 2.
        gamma: decay length, in tokens; larger weighs late slots more; inf is no decay.
        first: the first drafted slot.

    Returns:
        (B,) float32, weight 1.0 at the first drafted slot.

    Raises:
        ValueError: block_size < 2 (nothing would be drafted) or gamma <= 0.

    Source: arXiv:2602.06036, eq. 4.
    """
    if block_size < 2:
        raise ValueError(f"block_size must be at least 2 (an anchor and a drafted token), got {block_size}")
    if not gamma > 0:
        raise ValueError(f"gamma must be above 0, got {gamma}")
    slots = torch.arange(block_size, dtype=torch.float32)
    gamma = max(gamma, torch.finfo(slots.dtype).tiny)  # less would be 0 there, and 0 / 0
    decay = torch.ones(block_size) if math.isinf(gamma) else torch.exp(-(slots - first) / gamma)
    return torch.where(slots < first, 0.0, decay)


def dynamic_weights(probabilities: Tensor, mask: Tensor) -> Tensor:
    """D-PACE: each slot weighs as much as it still matters, given how likely decoding is to get there and beyond.

    c_k = (1 - s) p_k + s and w_k = sum over m >= k of c_1 .. c_m. A masked slot is 1 in the products, 0 in the sum.

    Args:
        probabilities: (..., B) the draft's probability of each slot's label.
        mask: (..., B) bool, does the slot count?

    Returns:
        (..., B), 0 where masked. The loss is normalised by the anchors, not by these weights.

    Source: arXiv:2605.18810.
    """
    chances = torch.where(mask, (1 - DPACE_FLOOR) * probabilities + DPACE_FLOOR, 1.0)
    reached = chances.cumprod(-1) * mask
    return reached.flip(-1).cumsum(-1).flip(-1) * mask


def anchor_candidates(supervised: Tensor, lengths: Tensor) -> Tensor:
    """Positions that may start a block: the next token is inside the sequence and supervised.

    Args:
        supervised: (N, S) bool, was this token written by the target's side of the conversation?
        lengths: (N,) tokens of each sequence; positions from there on are padding.

    Returns:
        (N, S) bool.
    """
    position = torch.arange(supervised.shape[1], device=supervised.device)
    following = torch.nn.functional.pad(supervised[:, 1:], (0, 1), value=False)
    return following & (position + 1 < lengths[:, None])


def block_starts(candidates: Tensor, block_size: int) -> Tensor:
    """The candidates at which a fixed cut into blocks starts one: every B-th position from the first candidate on.

    Args:
        candidates: (N, S) bool.

    Returns:
        (N, S) bool.
    """
    first = candidates.int().argmax(1, keepdim=True)
    return candidates & ((torch.arange(candidates.shape[1], device=candidates.device) - first) % block_size == 0)


def sample_anchors(candidates: Tensor, count: int, seeds: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Draw anchors uniformly without replacement, sorted, each sequence from its own random stream.

    A sequence's anchors depend on its seed alone, so they are the same however a batch is split over
    workers and accumulation steps.

    Args:
        candidates: (N, S) bool.
        count: A; a sequence with fewer candidates is padded with invalid slots at position 0.
        seeds: N seeds, e.g. (run seed, epoch, row).

    Returns:
        anchors (N, A) int64 and valid (N, A) bool.
    """
    def draw(row: np.ndarray, seed: Sequence[int]) -> np.ndarray:
        chosen = np.random.default_rng(list(seed)).permutation(np.flatnonzero(row))[:count]
        return np.sort(chosen)

    rows = candidates.cpu().numpy()
    return _pack([draw(row, seed) for row, seed in zip(rows, seeds, strict=True)], count, candidates)


def spread_anchors(candidates: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Deterministic anchors for evaluation: `count` candidates spread evenly over each sequence, or all there are.

    Args:
        candidates: (N, S) bool.
        count: A.

    Returns:
        anchors (N, A) int64 and valid (N, A) bool.
    """
    def pick(row: np.ndarray) -> np.ndarray:
        where = np.flatnonzero(row)
        return where[np.linspace(0, len(where) - 1, min(count, len(where))).round().astype(int)]

    return _pack([pick(row) for row in candidates.cpu().numpy()], count, candidates)


def _pack(chosen: list[np.ndarray], count: int, like: Tensor) -> tuple[Tensor, Tensor]:
    anchors = np.zeros((len(chosen), count), dtype=np.int64)
    valid = np.zeros((len(chosen), count), dtype=bool)
    for i, positions in enumerate(chosen):
        anchors[i, : len(positions)] = positions
        valid[i, : len(positions)] = True
    return torch.from_numpy(anchors).to(like.device), torch.from_numpy(valid).to(like.device)


def block_positions(anchors: Tensor, block_size: int) -> Tensor:
    """Absolute position of each slot: (N, A) anchors -> (N, A, B)."""
    return anchors[..., None] + torch.arange(block_size, device=anchors.device)


def block_tokens(ids: Tensor, anchors: Tensor, block_size: int, mask_token_id: int) -> Tensor:
    """Input tokens of each block: the anchor's own token, then MASK.

    Args:
        ids: (N, S) int64.
        anchors: (N, A) int64.

    Returns:
        (N, A, B) int64.
    """
    tokens = torch.full((*anchors.shape, block_size), mask_token_id, dtype=ids.dtype, device=ids.device)
    tokens[..., 0] = ids.gather(1, anchors)
    return tokens


def block_labels(
    ids: Tensor, supervised: Tensor, lengths: Tensor, anchors: Tensor, valid: Tensor, block_size: int, first: int = 1
) -> tuple[Tensor, Tensor]:
    """What each slot should predict, and whether it counts.

    A slot counts when its LABEL is a supervised token inside the sequence; padding anchors never do, nor do slots
    before the first drafted one.

    Args:
        ids, supervised: (N, S).
        lengths: (N,).
        anchors, valid: (N, A).
        first: the first drafted slot.

    Returns:
        labels (N, A, B) int64 (0 where masked) and mask (N, A, B) bool.
    """
    positions = block_positions(anchors, block_size) + 1 - first
    inside = positions < lengths[:, None, None]
    flat = torch.where(inside, positions, 0).flatten(1)
    labels = ids.gather(1, flat).view_as(positions)
    mask = supervised.gather(1, flat).view_as(positions) & inside & valid[..., None]
    mask[..., :first] = False
    return torch.where(mask, labels, 0), mask


def visible(anchors: Tensor, context: int, block_size: int) -> Tensor:
    """The attention mask as a dense reference: a block sees context strictly before its anchor, and itself.

    Args:
        anchors: (N, A) int64.
        context: S.
        block_size: B.

    Returns:
        (N, A*B, S + A*B) bool; queries are the blocks' slots, keys are [context ; the blocks' slots].
    """
    count = anchors.shape[1]
    before = torch.arange(context, device=anchors.device) < anchors.repeat_interleave(block_size, 1)[..., None]
    block = torch.arange(count, device=anchors.device).repeat_interleave(block_size)
    same = (block[:, None] == block[None, :]).expand(len(anchors), -1, -1)
    return torch.cat([before, same], dim=-1)
