"""Propose -> verify -> commit: greedy decoding, by the target alone and with a draft; one trace a prompt.

Shapes: B block size, V vocabulary, D width, T tapped layers. One sequence at a time (N = 1).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import torch
from torch import Tensor

from draftlab.cache import KVCache
from draftlab.draft import Draft
from draftlab.errors import UserError
from draftlab.target import Head, Target


@dataclass(frozen=True)
class Round:
    """One draft and one verification.

    `drafted` counts the drafted tokens at stake: B-1, fewer where the limit or an accepted EOS comes first.
    """

    drafted: int
    """Drafted tokens that the round could have committed."""
    accepted: int
    """Leading drafted tokens that are the target's own."""
    committed: int
    """accepted + 1 (the bonus token); accepted alone where the last accepted token is EOS."""
    draft_seconds: float
    """The block's forward and its head."""
    verify_seconds: float
    """The target's forward over the block, its head and the comparison."""
    commit_seconds: float
    """The rest: both caches brought to the committed length, bookkeeping."""


@dataclass(frozen=True)
class Trace:
    """How one prompt was decoded."""

    prompt_tokens: int
    tokens: list[int]
    """New tokens, the final EOS included. The prefill gives the first, each round the next ones."""
    prefill_seconds: float
    """The prompt's forward and the first token; speculative decoding also fills the draft's cache."""
    seconds: float
    """Decoding after the prefill."""
    rounds: list[Round] = field(default_factory=list)
    """Empty for the target alone."""


@dataclass(frozen=True)
class Divergence:
    """The first place where two outputs differ."""

    position: int
    """Index among the new tokens."""
    ours: int | None
    theirs: int | None
    """The two tokens; None where that output had ended."""
    gap: float
    """The target's best logit there minus its second best, float32: near 0, the kernels broke a tie."""


def check_prompt(target: Target, prompt_ids: Sequence[int], max_new_tokens: int) -> None:
    """Refuse what can't be decoded.

    Raises:
        UserError: an empty prompt, ids outside the vocabulary, or more positions than the target has.
    """
    if not len(prompt_ids):
        raise UserError("prompt: expected at least one token, got none")
    if not 0 <= min(prompt_ids) <= max(prompt_ids) < target.vocab_size:
        found = f"{min(prompt_ids)}..{max(prompt_ids)}"
        raise UserError(f"prompt: expected token ids below {target.vocab_size}, got {found}")
    if len(prompt_ids) + max_new_tokens > target.max_positions:
        raise UserError(
            f"prompt of {len(prompt_ids)} tokens + eval.max_new_tokens {max_new_tokens}: "
            f"the target has {target.max_positions} positions"
        )


@torch.inference_mode()
def decode_target(target: Target, prompt_ids: Sequence[int], max_new_tokens: int) -> Trace:
    """The target's own greedy decoding, up to and including the first EOS token, or to the limit.

    Args:
        prompt_ids: the whole prompt, chat template included.
        max_new_tokens: limit, the prefill's token included; at least 1.

    Raises:
        UserError: see check_prompt.
    """
    check_prompt(target, prompt_ids, max_new_tokens)
    head, device = target.ends.head, target.device
    cache = _cache(target, len(prompt_ids) + max_new_tokens)
    began = _clock(device)
    hidden, _ = target.forward(torch.tensor([prompt_ids], device=device), cache)
    token = head.greedy(hidden[:, -1])
    tokens = token.tolist()
    first = _clock(device)
    while tokens[-1] not in target.eos_token_ids and len(tokens) < max_new_tokens:
        hidden, _ = target.forward(token[None], cache)
        token = head.greedy(hidden[0])
        tokens.append(token.item())
    return Trace(len(prompt_ids), tokens, first - began, _clock(device) - first)


@torch.inference_mode()
def generate(target: Target, prompt_ids: Sequence[int], max_new_tokens: int) -> list[int]:
    """The new tokens of transformers' own greedy decoding: what every other decoding here must equal.

    Plain argmax, as a draft is verified against: a repetition penalty that the model comes with is switched off.
    """
    ids = torch.tensor([prompt_ids], device=target.device)
    out = target.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        repetition_penalty=1.0,
        eos_token_id=sorted(target.eos_token_ids),
        pad_token_id=min(target.eos_token_ids, default=0),  # unused: there is one row
    )
    return out[0, len(prompt_ids) :].tolist()


@torch.inference_mode()
def decode_speculative(
    target: Target, draft: Draft, prompt_ids: Sequence[int], max_new_tokens: int, block_size: int | None = None
) -> Trace:
    """Greedy speculative decoding: the target's own greedy output, in fewer of its forwards.

    A round drafts one block from the anchor (the last committed token), verifies it in one target forward, and commits
    the longest prefix that is the target's own choice plus the target's next token, which is the next anchor.

    Args:
        prompt_ids, max_new_tokens: as in decode_target.
        block_size: B, the anchor included; None is the size that the draft was trained with.

    Raises:
        UserError: see check_prompt; a block size below 2.
    """
    check_prompt(target, prompt_ids, max_new_tokens)
    size = draft.spec.block_size if block_size is None else block_size
    if size < 2:
        raise UserError(f"block_size: expected at least 2 (an anchor and a drafted token), got {size}")
    taps, device = draft.spec.target_layer_ids, target.device
    embed, head, draft_head = target.ends.embedding, target.ends.head, draft.head(target.ends.head)
    limit = len(prompt_ids) + max_new_tokens
    cache, context = _cache(target, limit), draft.start(limit + size)
    masks = torch.full((size - 1,), draft.spec.mask_token_id, device=device)

    began = _clock(device)
    hidden, features = target.forward(torch.tensor([prompt_ids], device=device), cache, taps)
    draft.extend(context, features)
    anchor = head.greedy(hidden[:, -1])
    tokens = anchor.tolist()
    first = start = _clock(device)
    rounds = []
    while tokens[-1] not in target.eos_token_ids and len(tokens) < max_new_tokens:
        room = min(size, max_new_tokens - len(tokens))  # no token past the limit is verified, or needs a position
        hidden = draft.propose(context, embed(torch.cat([anchor, masks])[None]))
        guesses = draft_head.greedy(hidden[0, 1:room])
        drafted_at = _clock(device)

        hidden, features = target.forward(torch.cat([anchor, guesses])[None], cache, taps)
        answers = head.greedy(hidden[0])  # (room,): the target's token after the anchor and after each guess
        both = torch.cat([guesses, answers]).tolist()  # the round's one transfer
        verified_at = _clock(device)

        accepted, new = accept(both[: room - 1], both[room - 1 :], target.eos_token_ids)
        tokens += new
        anchor = answers[len(new) - 1, None]
        # What is committed is known to both models but for the new anchor, which has no target state yet.
        cache.rewind(len(prompt_ids) + len(tokens) - 1)
        draft.extend(context, features[:, : len(new)])
        end = _clock(device)
        at_stake = room - 1 if len(new) > accepted else accepted
        seconds = (drafted_at - start, verified_at - drafted_at, end - verified_at)
        rounds.append(Round(at_stake, accepted, len(new), *seconds))
        start = end
    return Trace(len(prompt_ids), tokens, first - began, start - first, rounds)


def accept(guesses: list[int], answers: list[int], eos_token_ids: frozenset[int]) -> tuple[int, list[int]]:
    """The longest accepted prefix of a block and the tokens to commit.

    Args:
        guesses: the n drafted tokens.
        answers: the target's n + 1 choices: after the anchor, and after each guess.

    Returns:
        (accepted, committed tokens): the accepted guesses and the target's next token, cut after the first EOS.
    """
    committed = []
    for guess, answer in zip_longest(guesses, answers):
        committed.append(answer)
        if guess != answer:
            return len(committed) - 1, committed
        if answer in eos_token_ids:
            break
    return len(committed), committed


@torch.inference_mode()
def divergence(
    target: Target, prompt_ids: Sequence[int], ours: Sequence[int], theirs: Sequence[int]
) -> Divergence | None:
    """Where two outputs of one prompt first differ, and how sure the target is there; None if they are equal.

    Its forward recomputes the common text at once, so in low precision it may rank the two tokens in either order.
    """
    pairs = enumerate(zip_longest(ours, theirs))
    position, pair = next(((i, pair) for i, pair in pairs if pair[0] != pair[1]), (None, None))
    if position is None:
        return None
    text = [*prompt_ids, *ours[:position]]
    hidden, _ = target.forward(torch.tensor([text], device=target.device), _cache(target, len(text)))
    head, last = target.ends.head, hidden[:, -1].contiguous()
    # The candidates' logits again in float32, for logits of low precision come in coarse steps.
    likely = head.logits(last)[0].topk(min(16, target.vocab_size)).indices
    best = Head(head.weight[likely].float(), head.softcap).logits(last.float())[0].topk(2).values
    return Divergence(position, *pair, gap=float(best[0] - best[1]))


def _cache(target: Target, max_length: int) -> KVCache:
    return KVCache(target.config, 1, max_length, dtype=target.dtype, device=target.device)


def _clock(device: torch.device) -> float:
    """Seconds, when the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
