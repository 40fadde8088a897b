"""Propose -> verify -> commit: decoding by the target alone and with a draft, greedy or sampled; one trace a prompt.

Prompts are decoded together: rows have each their own length, accept each its own number of tokens, and leave when
their text ends. A row's draws come from its own stream, so its text does not depend on its company.

Shapes: N rows still decoded, B block size, n drafted tokens a row (B-1, in the layout `next` B, or less at the limit),
V vocabulary, D width.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np
import torch
from torch import Tensor

from draftlab.cache import KVCache, packed
from draftlab.draft import Draft
from draftlab.errors import UserError
from draftlab.schedule import Schedule, reach
from draftlab.target import Head, Target

MODES = ("rejection", "greedy_draft")
COLDEST = 1e-6
"""Lowest temperature that samples: below it logits overflow, and 0 does the same."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. Temperature, top-k and top-p bend the draft's distribution and the target's alike."""

    temperature: float = 0.0
    """0 is greedy decoding: the most likely token."""
    top_k: int | None = None
    """Keep the k most likely tokens; None keeps all."""
    top_p: float = 1.0
    """Keep the most likely tokens that together have this probability; 1 keeps all."""
    mode: str = "rejection"
    """`rejection`: the draft is sampled, kept with probability min(1, q/p), else replaced from the residual q - p.
    `greedy_draft` (the published code): the draft's best token is kept where it equals a sample of the target."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UserError(f"sampling mode: expected {' or '.join(MODES)}, got {self.mode}")
        cold = 0 < self.temperature < COLDEST or not self.temperature >= 0
        if cold or not (0 < self.top_p <= 1 and (self.top_k is None or self.top_k >= 1)):
            raise UserError(
                f"sampling: expected temperature 0 or >= {COLDEST}, top_k >= 1 and 0 < top_p <= 1, "
                f"got {self.temperature}, {self.top_k} and {self.top_p}"
            )

    @property
    def protocol(self) -> str:
        """What a result is named by: `greedy`, or the mode and all that bends the distributions."""
        if not self.temperature:
            return "greedy"
        bends = [f"temperature {self.temperature:g}"]
        bends += [f"top-k {self.top_k}"] if self.top_k else []
        bends += [f"top-p {self.top_p:g}"] if self.top_p < 1 else []
        return f"{self.mode}, {', '.join(bends)}"


@dataclass(frozen=True)
class Round:
    """One draft and one verification, as one row saw it.

    `drafted` counts the drafted tokens at stake: all of the block's, fewer where the limit or an EOS comes first, or
    where a schedule had fewer verified. Seconds are the row's share, the call's seconds / `rows`, so that sums over
    prompts are time on the clock.
    """

    drafted: int
    """Drafted tokens that the round could have committed."""
    accepted: int
    """Leading drafted tokens that the target kept."""
    committed: int
    """accepted + 1 (the bonus token); accepted alone where the last accepted token is EOS."""
    draft_seconds: float
    """The draft's forward over the block, its heads, the choice of the verified length, and the features of what was
    committed into its cache."""
    verify_seconds: float
    """The target's forward over the block, its head and the decision."""
    commit_seconds: float
    """The rest: both caches brought to the committed length, bookkeeping."""
    rows: int = 1
    """Rows that shared the calls."""
    confidence: tuple[float, ...] = ()
    """Logit of each drafted token at stake, not calibrated; empty without a confidence head."""


@dataclass
class Trace:
    """How one prompt was decoded. Seconds are its share of a batch's, as in `Round`."""

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


def check_prompt(target: Target, prompt_ids: Sequence[int], max_new_tokens: int, draft: Draft | None = None) -> None:
    """Refuse what can't be decoded.

    Raises:
        UserError: an empty prompt, ids outside the vocabulary, or more positions than the target or the draft has.
    """
    if not len(prompt_ids):
        raise UserError("prompt: expected at least one token, got none")
    if not 0 <= min(prompt_ids) <= max(prompt_ids) < target.vocab_size:
        found = f"{min(prompt_ids)}..{max(prompt_ids)}"
        raise UserError(f"prompt: expected token ids below {target.vocab_size}, got {found}")
    models = {"target": target.max_positions} | ({"draft": draft.spec.max_position_embeddings} if draft else {})
    for name, positions in models.items():
        if len(prompt_ids) + max_new_tokens > positions:
            raise UserError(
                f"prompt of {len(prompt_ids)} tokens + eval.max_new_tokens {max_new_tokens}: "
                f"the {name} has {positions} positions"
            )


def check_confidence(draft: Draft, name: str) -> None:
    """Refuse a schedule for a draft that has no confidence head.

    Raises:
        UserError: naming both settings.
    """
    if not draft.spec.confidence:
        raise UserError(f"eval.schedule=confidence: needs draft.confidence=true, but {name} has no confidence head")


@torch.inference_mode()
def decode_target(
    target: Target,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling = Sampling(),
    streams: Sequence[int] | None = None,
) -> list[Trace]:
    """The target's own decoding, up to and including the first EOS token, or to the limit.

    Args:
        prompts: whole prompts, chat template included; they are decoded as one batch.
        max_new_tokens: limit of each text, the prefill's token included; at least 1.
        streams: which of the seed's streams of draws each prompt takes; by default its place in `prompts`.

    Returns:
        One trace a prompt.

    Raises:
        UserError: see check_prompt.
    """
    for prompt in prompts:
        check_prompt(target, prompt, max_new_tokens)
    head, eos = target.ends.head, target.eos_token_ids
    rows = _rows(prompts, max_new_tokens, sampling, streams)
    traces = [row.trace for row in rows]
    cache = _cache(target, len(prompts), max(map(len, prompts)) + max_new_tokens)

    lap = _stopwatch(target.device)
    hidden, _ = target.forward(_padded(prompts, target.device), cache)
    tokens = _choose(head, _last(hidden, prompts), sampling, _draws(rows))[:, None]
    rows, tokens = _commit(rows, tokens, tokens.tolist(), eos, cache)
    _share(lap(), traces, "prefill_seconds")
    while rows:
        hidden, _ = target.forward(tokens, cache)
        tokens = _choose(head, hidden[:, 0], sampling, _draws(rows))[:, None]
        sharing = [row.trace for row in rows]
        rows, tokens = _commit(rows, tokens, tokens.tolist(), eos, cache)
        _share(lap(), sharing, "seconds")
    return traces


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
    target: Target,
    draft: Draft,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    block_size: int | None = None,
    sampling: Sampling = Sampling(),
    streams: Sequence[int] | None = None,
    schedule: Schedule | None = None,
) -> list[Trace]:
    """Speculative decoding: what the target alone would write, in fewer of its forwards.

    A round drafts one block from each row's anchor (its last committed token), verifies the blocks in one target
    forward, and commits the longest prefix that the target keeps plus the target's next token, the next anchor.

    Args:
        prompts, max_new_tokens, streams: as in decode_target.
        block_size: B, the anchor included; None is the size that the draft was trained with. B-1 tokens are drafted,
            or B in the layout `next`.
        schedule: has each call verify only as much of its blocks as pays by the draft's confidence, one length for all
            rows. A row's sampled text then hangs on its company and on the measured seconds; its distribution does not.
            None verifies whole blocks.

    Raises:
        UserError: see check_prompt; a block size below 2; a schedule for a draft without a confidence head.
    """
    for prompt in prompts:
        check_prompt(target, prompt, max_new_tokens, draft)
    size = draft.spec.block_size if block_size is None else block_size
    if size < 2:
        raise UserError(f"block_size: expected at least 2 (an anchor and a drafted token), got {size}")
    if schedule is not None:
        check_confidence(draft, "the draft")
    taps, eos, device = draft.spec.target_layer_ids, target.eos_token_ids, target.device
    embed, head, draft_head = target.ends.embedding, target.ends.head, draft.head(target.ends.head)
    rows = _rows(prompts, max_new_tokens, sampling, streams)
    traces = [row.trace for row in rows]
    longest = max(map(len, prompts)) + max_new_tokens + size
    cache, context = _cache(target, len(prompts), longest), draft.start(longest, len(prompts))
    first = draft.spec.first_slot
    masks = torch.full((len(prompts), size - 1), draft.spec.mask_token_id, device=device)

    lap = _stopwatch(device)
    hidden, features = target.forward(_padded(prompts, device), cache, taps)
    draft.extend(context, features)
    anchors = _choose(head, _last(hidden, prompts), sampling, _draws(rows))[:, None]
    rows, anchors = _commit(rows, anchors, anchors.tolist(), eos, cache, context)
    _share(lap(), traces, "prefill_seconds")
    while rows:
        # No token past every limit is verified, or needs a position.
        room = min(size + 1 - first, max(row.left for row in rows))
        draws = _draws(rows, 3, size + 1 - first)
        stake = [min(row.left, room) - 1 for row in rows]
        hidden = draft.propose(context, embed(torch.cat([anchors, masks[: len(rows)]], dim=1)))
        slots = hidden[:, first : first + room - 1]
        guesses, p = _guess(draft, draft_head, slots, anchors[:, 0], sampling, draws[:, 0], target.vocab_size)
        confidence = _confidence(draft, slots, torch.cat([anchors, guesses], dim=1)[:, :-1])
        if schedule is not None:
            length = schedule.length(reach(confidence, draft.spec.confidence_temperatures), stake)
            guesses, p = guesses[:, :length], None if p is None else p[:, :length]
            stake = [min(own, length) for own in stake]
        draft_seconds = lap()

        hidden, features = target.forward(torch.cat([anchors, guesses], dim=1), cache, taps)
        accepted, answers = _verify(head, hidden, guesses, p, torch.tensor(stake, device=device), sampling, draws)
        found = torch.cat([accepted[:, None], answers], dim=1).tolist()  # one transfer
        verify_seconds = lap()

        new = [committed(kept, tokens, eos) for kept, *tokens in found]
        draft.extend(context, features[:, : max(map(len, new))])
        draft_seconds += lap()

        sharing = rows
        rows, anchors = _commit(rows, answers, new, eos, cache, context)
        seconds = [part / len(sharing) for part in (draft_seconds, verify_seconds, lap())]
        for row, (kept, *_), tokens, own, sure in zip(sharing, found, new, stake, confidence.tolist()):
            kept = min(kept, len(tokens))
            drafted = min(own, len(tokens)) if tokens[-1] in eos else own
            row.trace.rounds.append(Round(drafted, kept, len(tokens), *seconds, len(sharing), tuple(sure[:drafted])))
            row.trace.seconds += sum(seconds)
    return traces


# ---- how tokens are chosen; pure


def warp(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution that is sampled from: (R, V) logits -> (R, V) float32 probabilities. Temperature above 0."""
    logits = logits.float() / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[:, -1:], -torch.inf)
    p = logits.softmax(-1)
    if sampling.top_p < 1:
        best, order = p.sort(dim=-1, descending=True)
        enough = best.cumsum(-1) - best >= sampling.top_p  # the more likely tokens have that much without it
        p = p.masked_fill(torch.zeros_like(enough).scatter(-1, order, enough), 0.0)
        p = p / p.sum(-1, keepdim=True)
    return p


def draw(p: Tensor, uniform: Tensor) -> Tensor:
    """One token of each row, by inversion: (R, V) weights and (R,) draws in [0, 1) -> (R,) ids."""
    sums = p.double().cumsum(-1)
    at = uniform.to(p.device)[:, None] * sums[:, -1:]
    return torch.searchsorted(sums, at, right=True)[:, 0].clamp_(max=p.shape[-1] - 1)


def leading(kept: Tensor, stake: Tensor) -> Tensor:
    """(N,) how many of each row's guesses are kept before the first that isn't: (N, n) bool, (N,) guesses at stake."""
    at_stake = torch.arange(kept.shape[1], device=kept.device) < stake[:, None]
    return (kept & at_stake).long().cumprod(1).sum(1)


def reject(
    guesses: Tensor, p: Tensor, q: Tensor, stake: Tensor, keep: Tensor, replace: Tensor
) -> tuple[Tensor, Tensor]:
    """Rejection sampling: tokens distributed as the target's, out of guesses distributed as the draft's.

    Args:
        guesses: (N, n), drawn from p.
        p: (N, n, V) the draft's distributions.
        q: (N, n + 1, V) the target's: after the anchor, and after each guess.
        stake: (N,) how many of its guesses a row can commit.
        keep: (N, n) draws: a guess is kept with probability min(1, q/p).
        replace: (N,) draws: the next token comes from max(q - p, 0), or from q where no guess at stake is left.

    Returns:
        accepted (N,), and the block's tokens (N, n + 1): the guesses, the token at `accepted` replaced.

    Source: arXiv:2211.17192, algorithm 1.
    """
    rows = torch.arange(len(guesses), device=guesses.device)
    ours, theirs = (d.gather(2, guesses[..., None])[..., 0] for d in (p, q[:, :-1]))
    accepted = leading(keep.to(p.device) * ours < theirs, stake)
    wanted, drafted = q[rows, accepted], torch.cat([p, torch.zeros_like(q[:, :1])], dim=1)[rows, accepted]
    rest = (wanted - drafted * (accepted < stake)[:, None]).clamp(min=0)
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, wanted)  # p = q but for rounding
    answers = torch.cat([guesses, guesses[:, :1].new_zeros(len(rows), 1)], dim=1)
    return accepted, answers.scatter(1, accepted[:, None], draw(rest, replace)[:, None])


def committed(accepted: int, answers: list[int], eos_token_ids: frozenset[int]) -> list[int]:
    """What a row commits: the accepted guesses and the target's next token, cut after the first EOS.

    Args:
        answers: the target's tokens of the block; the first `accepted` are the guesses.
    """
    new = answers[: accepted + 1]
    return new[: next((end for end, token in enumerate(new, 1) if token in eos_token_ids), len(new))]


# ---- heads


def _confidence(draft: Draft, hidden: Tensor, previous: Tensor) -> np.ndarray:
    """(N, n) logits of the confidence head at the slots (N, n, D) after tokens (N, n); (N, 0) without such a head."""
    if not draft.spec.confidence:
        return np.empty((len(hidden), 0))
    return draft.confidence(hidden, previous).float().cpu().numpy()


def _choose(head: Head, hidden: Tensor, sampling: Sampling, draws: Tensor) -> Tensor:
    """The target's token of each row: (R, D) -> (R,), the most likely or a sample."""
    if not sampling.temperature:
        return head.greedy(hidden)
    return draw(warp(head.logits(hidden.contiguous()), sampling), draws)


def _guess(
    draft: Draft, head: Head, hidden: Tensor, anchors: Tensor, sampling: Sampling, draws: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor | None]:
    """The draft's tokens (N, n) from its hidden states (N, n, D), and, where sampled, its distributions (N, n, V)."""
    shape = hidden.shape[:2]
    products = head.products(hidden.flatten(0, 1).contiguous())  # of all slots at once; weights are read once
    if draft.spec.markov_head is None or not shape[1]:
        guesses, p = _pick(head, head.cap(products), sampling, draws[:, : shape[1]].flatten(), vocab_size)
        return guesses.unflatten(0, shape), None if p is None else p.unflatten(0, shape)
    found, token, state, markov = [], anchors, None, draft.markov_head
    for k, slot in enumerate(products.unflatten(0, shape).unbind(1)):
        latent, state = markov.step(hidden[:, k], token, state)
        logits = head.cap(slot + markov.correction(latent, slot.dtype))
        found.append(_pick(head, logits, sampling, draws[:, k], vocab_size))
        token = found[-1][0]
    guesses, p = zip(*found)
    return torch.stack(guesses, dim=1), None if p[0] is None else torch.stack(p, dim=1)


def _pick(
    head: Head, logits: Tensor, sampling: Sampling, draws: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor | None]:
    """A drafted token of each row of logits (R, V'), and, where sampled, the distributions (R, V)."""
    if not sampling.temperature or sampling.mode == "greedy_draft":
        return head.best(logits), None
    p = warp(logits, sampling)
    if head.token_ids is not None:  # a reduced vocabulary: the other tokens have probability 0
        p = p.new_zeros(len(p), vocab_size).index_copy_(1, head.token_ids, p)
    return draw(p, draws), p


def _verify(
    head: Head, hidden: Tensor, guesses: Tensor, p: Tensor | None, stake: Tensor, sampling: Sampling, draws: Tensor
) -> tuple[Tensor, Tensor]:
    """How many guesses the target keeps (N,), and its tokens (N, n + 1), from its hidden states (N, n + 1, D)."""
    shape, hidden = hidden.shape[:2], hidden.flatten(0, 1)
    if p is None:
        answers = _choose(head, hidden, sampling, draws[:, 1, : shape[1]].flatten()).unflatten(0, shape)
        return leading(guesses == answers[:, :-1], stake), answers
    q = warp(head.logits(hidden), sampling).unflatten(0, shape)
    return reject(guesses, p, q, stake, draws[:, 1, : shape[1] - 1], draws[:, 2, 0])


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
    hidden, _ = target.forward(torch.tensor([text], device=target.device), _cache(target, 1, len(text)))
    head, last = target.ends.head, hidden[:, -1].contiguous()
    # The candidates' logits again in float32, for logits of low precision come in coarse steps.
    likely = head.logits(last)[0].topk(min(16, target.vocab_size)).indices
    best = Head(head.weight[likely].float(), head.softcap).logits(last.float())[0].topk(2).values
    return Divergence(position, *pair, gap=float(best[0] - best[1]))


# ---- the rows of a batch


@dataclass
class _Row:
    """One prompt's text while it grows."""

    trace: Trace
    left: int
    """New tokens that it may still get; 0 when the text has ended."""
    random: np.random.Generator

    @property
    def length(self) -> int:
        """Positions that the models know: all but the last token's."""
        return self.trace.prompt_tokens + len(self.trace.tokens) - 1


def _rows(
    prompts: Sequence[Sequence[int]], max_new_tokens: int, sampling: Sampling, streams: Sequence[int] | None
) -> list[_Row]:
    streams = range(len(prompts)) if streams is None else streams
    return [
        _Row(Trace(len(prompt), [], 0.0, 0.0), max_new_tokens, np.random.default_rng([sampling.seed, stream]))
        for prompt, stream in zip(prompts, streams, strict=True)
    ]


def _draws(rows: Sequence[_Row], *shape: int) -> Tensor:
    """(N, *shape) uniform draws, each row's from its own stream; the device gets them when they are used."""
    return torch.from_numpy(np.stack([row.random.random(shape) for row in rows]))


def _commit(
    rows: list[_Row], tokens: Tensor, new: list[list[int]], eos_token_ids: frozenset[int], *caches: KVCache
) -> tuple[list[_Row], Tensor]:
    """The rows' texts grow; those that end leave; the caches are brought to what the texts of the others hold.

    Args:
        tokens: (N, m), of which each row takes the first as `new` lists them.

    Returns:
        The rows that stay, and the last token (N, 1) of each, which no model has read yet.
    """
    for row, added in zip(rows, new):
        row.trace.tokens += added
        row.left = 0 if added[-1] in eos_token_ids else row.left - len(added)
    tokens = tokens.gather(1, torch.tensor([[len(added) - 1] for added in new], device=tokens.device))
    stay = packed([row.left > 0 for row in rows])
    if len(stay) < len(rows):
        index = torch.tensor(stay, dtype=torch.long, device=tokens.device)
        rows, tokens = [rows[row] for row in stay], tokens[index]
        for cache in caches:
            cache.keep_rows(index)
    for cache in caches:
        cache.rewind([row.length for row in rows])
    return rows, tokens


def _share(seconds: float, traces: Sequence[Trace], name: str) -> None:
    for trace in traces:
        setattr(trace, name, getattr(trace, name) + seconds / len(traces))


def _padded(prompts: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """(N, longest) ids, padded on the right, where no causal attention looks."""
    return torch.tensor(list(zip_longest(*prompts, fillvalue=0)), device=device).T


def _last(hidden: Tensor, prompts: Sequence[Sequence[int]]) -> Tensor:
    """(N, longest, D) -> (N, D) at each prompt's last token."""
    last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=hidden.device)
    return hidden[torch.arange(len(last), device=hidden.device), last]


def _cache(target: Target, batch: int, max_length: int) -> KVCache:
    return KVCache(target.config, batch, max_length, dtype=target.dtype, device=target.device)


def _stopwatch(device: torch.device) -> Callable[[], float]:
    """A function that gives the seconds since its last call, when the device has done what it was given."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    laps = [now()]

    def lap() -> float:
        laps.append(now())
        return laps[-1] - laps.pop(0)

    return lap
