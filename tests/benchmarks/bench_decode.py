"""How fast is decoding: against transformers' `generate`, and against a plain loop over transformers' own classes?

The target's own decoding, which speedups are measured against, must be as fast as `generate`. The plain loop drafts and
verifies as the authors' code does, with DynamicCache, cropped after each round; in a batch it masks what a row did not
accept. It has the same draft, so in float32 the same rounds. And how much of our round is in no forward at all? All
take turns in one process.

Run:    python tests/benchmarks/bench_decode.py --ckpt FOLDER
        python tests/benchmarks/bench_decode.py target.dtype=float32 draft.block_size=16
        python tests/benchmarks/bench_decode.py --ckpt FOLDER --device cuda
    FOLDER is a checkpoint of a dflash draft, .../trials/<name>/draft.
Cost:   about four minutes on two idle CPU cores.
Exit:   1 when decoding by the target alone takes over 5 % longer than `generate` (ratio of medians), in float32 when
    texts or rounds differ, or when bookkeeping (all of a round that is no forward of the draft or the target, heads
    included) takes 5 % of the rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from measuring import Parts, alternate, now, parser, start
from torch import Tensor, nn
from transformers import DynamicCache, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    rotate_half,
)

from draftlab import checkpoint, cli
from draftlab.config import DraftConfig
from draftlab.decode import Trace, decode_speculative, decode_target, generate
from draftlab.draft import Draft, adapt
from draftlab.errors import UserError
from draftlab.target import Head, Target, load_target

QUESTIONS = (
    "Why is the sky blue?", "Write a short poem about a llama.", "What is the capital of France?",
    "Explain how a bicycle stays upright.", "Give me three tips for better sleep.", "What is a prime number?",
    "Who wrote Hamlet, and what is it about?", "How do I boil an egg?",
)  # fmt: skip
ALLOWED = 1.05


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--ckpt", type=Path, help="folder of a dflash draft; by default an untrained one")
    options.add_argument("--batches", type=cli.integers, default=[1, 8], metavar="N,N,...", help="prompts at once")
    options.add_argument("--tokens", type=int, default=32, help="most new tokens of a text")
    options.add_argument("--rounds", type=int, default=3, help="times that each way decodes all prompts")
    args = options.parse_args(argv)
    if args.ckpt:
        cli.check_unused(args.overrides, {f"draft.{name}": "--ckpt has its own" for name in DraftConfig.model_fields})
    run = start(args)
    if run is None:
        return 0
    target = load_target(run.target)
    if args.ckpt:
        draft, _ = checkpoint.load(args.ckpt)
        checkpoint.check_target(draft.spec, target)
    else:  # its time does not depend on what it has learnt, but its rounds do
        draft = Draft(adapt(target.config, run.draft, target.mask_token_id))
        draft.reset(run.seed)
    draft = draft.to(target.device, target.dtype).eval()
    prompts = [target.chat([{"role": "user", "content": question}]) for question in QUESTIONS]
    print(f"block size {draft.spec.block_size}, {draft.spec.num_hidden_layers} draft layers, {len(prompts)} prompts of "
          f"up to {args.tokens} new tokens, medians of {args.rounds} rounds")  # fmt: skip
    wrong = alone(target, prompts[:2], args.tokens, args.rounds)
    for batch in args.batches:
        wrong += speculative(target, draft, prompts, batch, args.tokens, args.rounds)
    return int(wrong)


def alone(target: Target, prompts: list[list[int]], tokens: int, rounds: int) -> bool:
    """decode_target against `generate`; is it too slow, or another text in float32?"""

    def ours() -> tuple[list[list[int]], float]:
        began = now()
        return [decode_target(target, [prompt], tokens)[0].tokens for prompt in prompts], now() - began

    def theirs() -> tuple[list[list[int]], float]:
        began = now()
        return [generate(target, prompt, tokens) for prompt in prompts], now() - began

    found = alternate({"decode_target": ours, "generate": theirs}, rounds)
    (texts, _), (others, _) = (some[0] for some in found.values())
    seconds = [median(spent for _, spent in some) for some in found.values()]
    ratio = seconds[0] / seconds[1]
    each = [f"{name} {1e3 * spent / sum(map(len, texts)):.2f}" for name, spent in zip(found, seconds)]
    print(f"target alone, ms a token: {', '.join(each)}; ratio {ratio:.3f}; same text: {texts == others}")
    return ratio > ALLOWED or (texts != others and target.dtype == torch.float32)


def speculative(
    target: Target, draft: Draft, prompts: list[list[int]], batch: int, tokens: int, rounds: int
) -> bool:
    """Our decoding against the plain loop; do they differ in float32, or is there too much bookkeeping?"""
    groups = [prompts[at : at + batch] for at in range(0, len(prompts), batch)]
    plain_draft = PlainDraft(draft, target.ends.head).to(target.device, target.dtype)
    traces: list[list[Trace]] = []
    forwards = (target, "forward"), (draft, "propose"), (draft, "extend"), (Head, "products"), (Head, "best")

    def ours() -> tuple[list[list[int]], int, float]:
        began = now()
        found = [trace for group in groups for trace in decode_speculative(target, draft, group, tokens)]
        traces.append(found)
        return [trace.tokens for trace in found], sum(len(trace.rounds) for trace in found), now() - began

    def theirs() -> tuple[list[list[int]], int, float]:
        began = now()
        found = [plain(target, plain_draft, group, tokens) for group in groups]
        return [text for texts, _ in found for text in texts], sum(count for _, count in found), now() - began

    found = alternate({"draftlab": ours, "plain loop": theirs}, rounds)
    with Parts(*(("forwards", *place) for place in forwards)) as parts:
        ours()
    outside = parts.rest / sum(trace.seconds for trace in traces.pop())  # the prefill's too: an upper bound
    rates = {name: sum(map(len, some[0][0])) / median(spent for *_, spent in some) for name, some in found.items()}
    print(f"batch {batch}:")
    for name, rate in rates.items():
        texts, count, _ = found[name][0]
        print(f"  {name:10} {rate:7.1f} tokens/s {rate / rates['plain loop']:6.2f}x of the plain loop, "
              f"{sum(map(len, texts))} tokens in {count} rounds")  # fmt: skip
    (texts, *_), (others, *_) = found["draftlab"][0], found["plain loop"][0]
    differ = sum(ours != theirs for ours, theirs in zip(texts, others, strict=True))
    calls = [round_ for some in traces[1:] for trace in some for round_ in trace.rounds]
    each = [f"{part} {1e3 * median(getattr(r, f'{part}_seconds') * r.rows for r in calls):.2f}"
            for part in ("draft", "verify", "commit")]  # fmt: skip
    print(f"  our calls, median ms: {', '.join(each)}; in no forward {outside:.1%} of the rounds; "
          f"texts that differ: {differ}")  # fmt: skip
    same = found["draftlab"][0][:2] == found["plain loop"][0][:2]
    return outside > ALLOWED - 1 or (not same and target.dtype == torch.float32)


class PlainDraft(nn.Module):
    """The draft out of transformers' classes: context and block go through the projections together.

    Source: the authors' code of arXiv:2602.06036.
    """

    def __init__(self, draft: Draft, head: Head) -> None:
        super().__init__()
        spec = draft.spec
        if spec.variant != "dflash":
            raise UserError(f"draft: the plain loop only knows dflash, got {spec.variant}")
        config = Qwen3Config(**checkpoint.spec_to_json(spec, "float32"))
        width, eps = spec.hidden_size, spec.rms_norm_eps
        self.spec = spec
        self.fc = nn.Linear(len(spec.target_layer_ids) * spec.target_hidden_size, width, bias=False)
        self.hidden_norm, self.norm = Qwen3RMSNorm(width, eps), Qwen3RMSNorm(width, eps)
        self.layers = nn.ModuleList(Qwen3DecoderLayer(config, i) for i in range(spec.num_hidden_layers))
        weights = {name: weight for name, weight in draft.state_dict().items() if name not in ("d2t", "t2d")}
        self.load_state_dict(weights)
        self.rotary = Qwen3RotaryEmbedding(config)
        own = draft.head(head)
        self.head, self.token_ids = own.weight, own.token_ids

    def forward(
        self, features: Tensor, x: Tensor, positions: Tensor, mask: Tensor | None, cache: DynamicCache
    ) -> Tensor:
        """Draft a block.

        Args:
            features: (N, n, T*D) of the tokens committed since the last call.
            x: (N, B, D) embeddings of the block.
            positions: (N, n + B).
            mask: (N, 1, 1, keys) bool; None sees all.
            cache: of the context; grows by n + B.
        """
        context, size = self.hidden_norm(self.fc(features)), x.shape[1]
        cos, sin = (part[:, None] for part in self.rotary(x, positions))
        for i, layer in enumerate(self.layers):
            attention, y = layer.self_attn, layer.input_layernorm(x)
            both = torch.cat([context, y], dim=1)
            q, k, v = (
                project(some).unflatten(-1, (-1, self.spec.head_dim))
                for project, some in ((attention.q_proj, y), (attention.k_proj, both), (attention.v_proj, both))
            )
            q, k = attention.q_norm(q).transpose(1, 2), attention.k_norm(k).transpose(1, 2)
            q = q * cos[:, :, -size:] + rotate_half(q) * sin[:, :, -size:]
            k, v = cache.update(k * cos + rotate_half(k) * sin, v.transpose(1, 2), i)
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
            x = x + attention.o_proj(mixed.transpose(1, 2).flatten(-2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x)

    def tokens(self, hidden: Tensor) -> Tensor:
        """The likeliest tokens: (N, n, D) -> (N, n)."""
        best = F.linear(hidden, self.head).float().argmax(-1)  # on a CPU four times faster than of bfloat16
        return best if self.token_ids is None else self.token_ids[best]


@torch.inference_mode()
def plain(target: Target, draft: PlainDraft, prompts: list[list[int]], limit: int) -> tuple[list[list[int]], int]:
    """The texts, and the rounds that they took; all rows go on until the last has ended."""
    model, eos, device = target.model, target.eos_token_ids, target.device
    size, taps = draft.spec.block_size, draft.spec.target_layer_ids
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
    known = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    cache, context, ragged = DynamicCache(), DynamicCache(), len(prompts) > 1

    def forward(tokens: Tensor, mask: Tensor, places: Tensor, last: int) -> tuple[Tensor, Tensor]:
        out = model(
            tokens, attention_mask=mask if ragged else None, position_ids=places, cache=cache, use_cache=True,
            output_hidden_states=True, logits_to_keep=last,
        )  # fmt: skip
        return out.logits.float().argmax(-1), torch.cat([out.hidden_states[i + 1] for i in taps], dim=-1)

    places = (known.cumsum(1) - 1).clamp(min=0)
    anchors, features = forward(ids, known, places, 1)
    texts, lengths, rounds = [row[:] for row in anchors.tolist()], known.sum(1, keepdim=True), 0

    def going() -> list[bool]:
        return [len(text) < limit and text[-1] not in eos for text in texts]

    while any(still := going()):
        block = torch.full((len(prompts), size), draft.spec.mask_token_id, device=device)
        block[:, :1] = anchors
        seen = torch.cat([known, torch.ones_like(block)], dim=1)
        ahead = lengths + torch.arange(size, device=device)
        mask = seen.bool()[:, None, None] if ragged else None
        embeds = model.get_input_embeddings()(block)
        hidden = draft(features, embeds, torch.cat([places, ahead], dim=1), mask, context)
        context.crop(-size)
        block[:, 1:] = draft.tokens(hidden[:, 1:])
        answers, features = forward(block, seen, ahead, 0)
        accepted = (block[:, 1:] == answers[:, :-1]).long().cumprod(1).sum(1, keepdim=True)
        for text, goes, kept, row in zip(texts, still, accepted[:, 0].tolist(), answers.tolist()):
            new = row[: kept + 1][: limit - len(text)] if goes else []
            text += new[: next((end for end, token in enumerate(new, 1) if token in eos), len(new))]
        taken = (accepted + 1) * torch.tensor(still, device=device)[:, None]
        longest = int(taken.max())
        cache.crop(longest - size)
        known = torch.cat([known, (torch.arange(longest, device=device) < taken).long()], dim=1)
        features, places = features[:, :longest], ahead[:, :longest]
        lengths, anchors, rounds = lengths + taken, answers.gather(1, accepted), rounds + sum(still)
    return texts, rounds


if __name__ == "__main__":
    cli.main(main)
