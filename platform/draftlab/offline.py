"""Acceptance without decoding: every position of a text as an anchor, and the walk that decoding would take over it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from draftlab import blocks, metrics
from draftlab.decode import Trace
from draftlab.draft import Draft
from draftlab.features import Batch
from draftlab.target import Target
from draftlab.train import labels_there, leading_correct, make_blocks

ANCHORS_AT_ONCE = 64


@torch.no_grad()
def committed_everywhere(
    target: Target, draft: Draft, prompt: Sequence[int], answer: Sequence[int], block_size: int
) -> np.ndarray:
    """Tokens that a round would commit at each token of an answer, if the answer's own text were the target's choice.

    Args:
        prompt, answer: token ids.
        block_size: b, the anchor included.

    Returns:
        (len(answer),) int, as `metrics.offline_committed`; 0 at the last token, where there is nothing to draft.
    """
    ids = torch.tensor([[*prompt, *answer]], device=target.device)
    supervised = (torch.arange(ids.shape[1], device=ids.device) >= len(prompt))[None]
    lengths = torch.tensor([ids.shape[1]], device=ids.device)
    features, _ = target.tapped(ids, lengths, draft.spec.target_layer_ids)
    batch = Batch(ids, supervised, lengths, features, lengths * 0, None)
    spec, found = replace(draft.spec, block_size=block_size), []
    everywhere = blocks.position_weights(block_size, math.inf, spec.first_slot)
    for anchors in torch.arange(len(prompt), ids.shape[1], device=ids.device)[None].split(ANCHORS_AT_ONCE, dim=1):
        every = torch.ones_like(anchors, dtype=torch.bool)
        part = make_blocks(batch, anchors, every, spec, everywhere)
        hidden = draft(features, target.ends.embedding(part.tokens), anchors)
        latents = None if spec.markov_head is None else draft.markov_head(hidden, part.previous)
        correct = leading_correct(hidden, part, draft, draft.head(target.ends.head), ANCHORS_AT_ONCE, latents)
        found.append(metrics.offline_committed(correct, labels_there(batch, anchors, every, spec))[0])
    return np.concatenate(found)


def agreement(
    target: Target, draft: Draft, texts: Sequence[tuple[Sequence[int], Sequence[int], Trace]], block_size: int
) -> dict[str, float]:
    """Offline acceptance of the target's own greedy texts, and whether the serving walk over them is what decoding did.

    Args:
        texts: (prompt, the target's greedy answer, trace of its speculative decoding).
        block_size: b, which the traces were decoded with.

    Returns:
        `offline_acceptance_length`: over every position as an anchor; `walk_acceptance_length`: over the anchors of the
        serving walk; `walk_agreement`: share of the texts whose walk has the decoded rounds and tokens, 1 in float32.
    """
    everywhere, walks, agree = np.zeros(2), np.zeros(2), 0
    for prompt, answer, trace in texts:
        committed = committed_everywhere(target, draft, prompt, answer, block_size)
        walk = metrics.serving_walk(committed)
        everywhere += committed.sum(), (committed > 0).sum()
        walks += walk
        agree += walk == tuple(metrics.acceptance_items([trace])[0])
    return {
        "offline_acceptance_length": metrics.ratio(everywhere[None]),
        "walk_acceptance_length": metrics.ratio(walks[None]),
        "walk_agreement": agree / len(texts) if texts else math.nan,
    }
