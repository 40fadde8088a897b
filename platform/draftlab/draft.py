"""The draft model, whole: its shape, its layers, its variants and heads, its training and its cached forward.

Shapes: N sequences, S context tokens, A anchors per sequence, B block size, T tapped target layers, D width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.cache_utils import CacheLayerMixin
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from draftlab import blocks
from draftlab.cache import KVCache
from draftlab.config import DraftConfig
from draftlab.errors import UserError
from draftlab.target import Head, check_layer_ids


@dataclass(frozen=True)
class DraftSpec:
    """The shape of a draft: what its checkpoint's config.json says."""

    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    target_num_hidden_layers: int
    target_hidden_size: int
    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    rms_norm_eps: float
    rope_parameters: dict[str, Any] = field(hash=False)
    max_position_embeddings: int
    vocab_size: int
    tie_word_embeddings: bool
    label_layout: str = "same"
    variant: str = "dflash"
    markov_head: str | None = None
    markov_rank: int = 0
    confidence: bool = False
    confidence_temperatures: tuple[float, ...] | None = None
    """By which the confidence head's logits are divided, slot by slot; None is not calibrated."""
    draft_vocab_size: int | None = None
    """V': tokens that the draft can guess; None is all."""

    @property
    def first_slot(self) -> int:
        """The slot that drafts the token after the anchor."""
        return 0 if self.label_layout == "next" else 1

    @property
    def drafted_tokens(self) -> int:
        """Tokens that a block drafts: B-1, or B in the layout `next`."""
        return self.block_size - self.first_slot


def uniform_layer_ids(count: int, num_layers: int) -> tuple[int, ...]:
    """`count` of `num_layers` layers, spread from the second to the third-to-last.

    Source: arXiv:2602.06036, the authors' code. 5 of 36 is (1, 9, 17, 25, 33).
    """
    if count == 1:
        return (num_layers // 2,)
    return tuple(round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count))


def choose_layer_ids(choice: str, count: int, num_layers: int) -> tuple[int, ...]:
    """`count` of the layers that can be tapped, which are all but the last.

    Args:
        choice: `uniform`; or a control of the same size: `early`, `middle`, `late`, `random`, `random1`, ...

    Raises:
        UserError: there are not that many, or a probe has to propose them.
    """
    most = num_layers - 1
    if choice == "gate":
        raise UserError(
            "draft.layer_choice=gate: only experiments/sweep_target_layers.py, whose probe proposes the layers, knows "
            "which they are; expected draft.target_layer_ids"
        )
    if choice == "uniform" and count > max(1, num_layers - 3):
        raise UserError(
            f"draft.num_target_layers: a target of {num_layers} layers has {max(1, num_layers - 3)} to spread over "
            f"(second to third-to-last), got {count}; draft.target_layer_ids can name others"
        )
    if count > most:
        raise UserError(f"draft.num_target_layers: expected at most {most} of the target's layers, got {count}")
    if choice == "uniform":
        return uniform_layer_ids(count, num_layers)
    if choice.startswith("random"):
        draw = np.random.default_rng(int(choice.removeprefix("random") or 0))
        return tuple(sorted(draw.choice(most, count, replace=False).tolist()))
    first = {"early": 0, "middle": (most - count) // 2, "late": most - count}[choice]
    return tuple(range(first, first + count))


def adapt(target_config: Any, draft: DraftConfig, mask_token_id: int) -> DraftSpec:
    """The draft's shape for a target: all that must change with a new target, in one place.

    Args:
        target_config: the target's (text) configuration of transformers.
        draft: what the user chose.
        mask_token_id: MASK, unless the user chose one.

    Raises:
        UserError: layers that can't be tapped, a mask id outside the embedding, or a shape that the first weights
            can't have.
    """
    depth = target_config.num_hidden_layers
    chosen = draft.target_layer_ids
    if chosen is None:
        chosen = choose_layer_ids(draft.layer_choice, draft.num_target_layers, depth)
    ids = check_layer_ids(chosen, depth)
    mask = mask_token_id if draft.mask_token_id is None else draft.mask_token_id
    if not 0 <= mask < target_config.vocab_size:
        vocabulary = target_config.vocab_size
        raise UserError(f"draft.mask_token_id: expected an id below the target's {vocabulary}, got {mask}")
    if draft.vocab is not None and draft.vocab > target_config.vocab_size:
        raise UserError(f"draft.vocab: expected at most the target's {target_config.vocab_size}, got {draft.vocab}")
    if draft.init == "target_layers":
        if draft.num_hidden_layers > depth:
            raise UserError(
                f"draft.init=target_layers: {draft.num_hidden_layers} draft layers need as many target layers, "
                f"got {depth}; use draft.init=random"
            )
        if draft.intermediate_size not in (None, target_config.intermediate_size):
            raise UserError(
                f"draft.init=target_layers: draft.intermediate_size has to be the target's "
                f"{target_config.intermediate_size}, got {draft.intermediate_size}; use draft.init=random"
            )
    heads = target_config.num_attention_heads
    rope = dict(target_config.rope_parameters)
    rope = rope.get("full_attention") or rope  # models with one rope per kind of layer
    return DraftSpec(
        block_size=draft.block_size,
        mask_token_id=mask,
        target_layer_ids=ids,
        target_num_hidden_layers=depth,
        target_hidden_size=target_config.hidden_size,
        num_hidden_layers=draft.num_hidden_layers,
        hidden_size=target_config.hidden_size,
        intermediate_size=draft.intermediate_size or target_config.intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=getattr(target_config, "num_key_value_heads", None) or heads,
        head_dim=getattr(target_config, "head_dim", None) or target_config.hidden_size // heads,
        hidden_act="silu",
        rms_norm_eps=target_config.rms_norm_eps,
        rope_parameters={key: value for key, value in rope.items() if value is not None},
        max_position_embeddings=target_config.max_position_embeddings,
        vocab_size=target_config.vocab_size,
        tie_word_embeddings=bool(target_config.tie_word_embeddings),
        label_layout="next" if draft.variant == "dspark" else "same",
        variant=draft.variant,
        markov_head=draft.markov_head,
        markov_rank=draft.markov_rank if draft.markov_head else 0,
        confidence=draft.confidence,
        draft_vocab_size=draft.vocab,
    )


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (y * self.weight.float()).to(x.dtype)


Rope = tuple[Tensor, float]
"""Of a rotary embedding: its frequencies (rotated size / 2,) in radians a position, and what cosine and sine are scaled
by."""


def rope_of(spec: DraftSpec) -> Rope:
    """The target's rotary embedding.

    Raises:
        Exception: of whatever kind transformers has for parameters that its kind of rope can't use.
    """
    parameters, width = dict(spec.rope_parameters), spec.head_dim
    kind = parameters.get("rope_type", "default")
    with torch.device("cpu"):  # whatever device a draft is being made on
        if kind == "default":
            size = int(width * parameters.get("partial_rotary_factor", 1.0))
            exponent = torch.arange(0, size, 2, dtype=torch.float32) / size
            return parameters["rope_theta"] ** -exponent, 1.0
        config = LlamaConfig(
            head_dim=width, num_attention_heads=1, hidden_size=width, rope_parameters=parameters,
            max_position_embeddings=spec.max_position_embeddings,
        )  # fmt: skip
        return ROPE_INIT_FUNCTIONS[kind](config, device=torch.device("cpu"))


def rotary(rope: Rope, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine at positions (...), two (..., rotated size) in float32."""
    frequencies, scaling = rope
    angles = positions[..., None].float() * frequencies.to(positions.device)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos() * scaling, angles.sin() * scaling


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply a rotary embedding to the first dimensions of each head.

    Args:
        x: (N, P, heads, head_dim).
        cos, sin: (N or 1, P, size), size <= head_dim.
    """
    size = cos.shape[-1]
    y = x[..., :size].float()
    half = torch.cat([-y[..., size // 2 :], y[..., : size // 2]], dim=-1)
    turned = (y * cos.unsqueeze(-2) + half * sin.unsqueeze(-2)).to(x.dtype)
    return turned if size == x.shape[-1] else torch.cat([turned, x[..., size:]], dim=-1)


class Attention(nn.Module):
    """Queries from the block; keys and values from [context ; block] through the same projections.

    DFlare has projections of its own for the context.
    """

    def __init__(self, spec: DraftSpec) -> None:
        super().__init__()
        self.spec = spec
        width, size = spec.hidden_size, spec.head_dim
        self.q_proj = nn.Linear(width, spec.num_attention_heads * size, bias=False)
        self.k_proj = nn.Linear(width, spec.num_key_value_heads * size, bias=False)
        self.v_proj = nn.Linear(width, spec.num_key_value_heads * size, bias=False)
        if spec.variant == "dflare":
            self.k_proj_target = nn.Linear(width, spec.num_key_value_heads * size, bias=False)
            self.v_proj_target = nn.Linear(width, spec.num_key_value_heads * size, bias=False)
        self.o_proj = nn.Linear(spec.num_attention_heads * size, width, bias=False)
        self.q_norm = RMSNorm(size, spec.rms_norm_eps)
        self.k_norm = RMSNorm(size, spec.rms_norm_eps)

    def queries(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """(N, P, D) -> (N, P, heads, head_dim), normed and rotated."""
        return rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.spec.head_dim))), *rope)

    def keys_values(self, x: Tensor, rope: tuple[Tensor, Tensor], context: bool = False) -> tuple[Tensor, Tensor]:
        """(N, P, D) of the block or the context -> keys (normed and rotated) and values (N, P, kv heads, head_dim)."""
        own = context and self.spec.variant == "dflare"
        k_proj, v_proj = (self.k_proj_target, self.v_proj_target) if own else (self.k_proj, self.v_proj)
        keys = rotate(self.k_norm(k_proj(x).unflatten(-1, (-1, self.spec.head_dim))), *rope)
        return keys, v_proj(x).unflatten(-1, (-1, self.spec.head_dim))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, spec: DraftSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.up_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.down_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One draft layer; the attention over context and block is a function given by the caller."""

    def __init__(self, spec: DraftSpec) -> None:
        super().__init__()
        self.self_attn = Attention(spec)
        self.mlp = MLP(spec)
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], attend) -> Tensor:
        """x (N, P, D); attend(queries, keys, values of the block) -> (N, P, heads, head_dim)."""
        y = self.input_layernorm(x)
        mixed = attend(self.self_attn.queries(y, rope), *self.self_attn.keys_values(y, rope))
        x = x + self.self_attn.o_proj(mixed.flatten(-2))
        return x + self.mlp(self.post_attention_layernorm(x))


class MarkovHead(nn.Module):
    """Corrects a slot's logits by the token before it: markov_w2 of a latent vector of rank r.

    `vanilla`: the token's own vector; `gated`: that, gated by the slot's state; `rnn`: of a state along the block.

    Source: the DSpark paper, eq. 5 and 6; tensor names as in its authors' code.
    """

    def __init__(self, spec: DraftSpec) -> None:
        super().__init__()
        rank, self.kind = spec.markov_rank, spec.markov_head
        self.markov_w1 = nn.Embedding(spec.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, spec.draft_vocab_size or spec.vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(spec.hidden_size + rank, rank)
        if self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + spec.hidden_size, 3 * rank)

    def step(self, hidden: Tensor, previous: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """One slot: (..., D) states, (...) tokens before it, (..., r) state or None -> latent (..., r) and state."""
        vector = self.markov_w1(previous)
        if self.kind == "vanilla":
            return vector, None
        if self.kind == "gated":
            return self.gate_proj(torch.cat([hidden, vector.to(hidden.dtype)], dim=-1)).sigmoid() * vector, None
        state = torch.zeros_like(vector) if state is None else state
        joint = self.joint_proj(torch.cat([state.to(hidden.dtype), vector.to(hidden.dtype), hidden], dim=-1))
        gate, candidate, output = joint.chunk(3, dim=-1)
        gate = gate.sigmoid()
        return output.tanh(), gate * state + (1 - gate) * candidate.tanh()

    def correction(self, latent: Tensor, dtype: torch.dtype) -> Tensor:
        """What is added to the head's products, in their dtype: (R, r) -> (R, V')."""
        return latent.to(dtype) @ self.markov_w2.weight.to(dtype).T

    def forward(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Whole blocks: (..., B, D) and (..., B) -> (..., B, r)."""
        latents, state = [], None
        for k in range(hidden.shape[-2]):
            latent, state = self.step(hidden[..., k, :], previous[..., k], state)
            latents.append(latent)
        return torch.stack(latents, dim=-2)


class ConfidenceHead(nn.Module):
    """How likely a drafted token is to be accepted, given that those before it are; as a logit.

    Source: the DSpark paper, eq. 7; tensor names as in its authors' code.
    """

    def __init__(self, spec: DraftSpec) -> None:
        super().__init__()
        self.proj = nn.Linear(spec.hidden_size + spec.markov_rank, 1)

    def forward(self, hidden: Tensor, vector: Tensor | None) -> Tensor:
        """(..., D) states and, with a Markov head, (..., r) vectors of the tokens before them -> (...)."""
        inputs = hidden if vector is None else torch.cat([hidden, vector.to(hidden.dtype)], dim=-1)
        return self.proj(inputs)[..., 0]


class Draft(nn.Module):
    """A draft. Embedding and head belong to the target and are not part of it.

    The variants differ in what a layer reads of the target's T tapped layers:

    - `dflash`: all of them through one projection, the same for every layer.
    - `dflare`: a mix of its own, learned, through projections of its own.
    - `gated`: one mix for all layers, of tapped layers brought to the same size, so that its weights say which of
      them matter: a probe for choosing the layers.
    - `dspark`: reads as dflash does; its first slot drafts too, and it may have the heads above.

    Sources: arXiv:2602.06036, section 3 (dflash) and arXiv:2606.02091 (dflare); tensor names as in the authors'
    checkpoints.
    """

    def __init__(self, spec: DraftSpec, attention: str = "auto") -> None:
        super().__init__()
        self.spec = spec
        self.attention = attention
        self.rope = rope_of(spec)
        taps = len(spec.target_layer_ids)
        if self._projects:
            self.fc = nn.Linear(taps * spec.target_hidden_size, spec.hidden_size, bias=False)
        else:
            rows = spec.num_hidden_layers if spec.variant == "dflare" else 1
            self.layer_fusion_weights = nn.Parameter(torch.zeros(rows, taps))
        self.hidden_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(spec) for _ in range(spec.num_hidden_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        if spec.markov_head is not None:
            self.markov_head = MarkovHead(spec)
        if spec.confidence:
            self.confidence_head = ConfidenceHead(spec)
        if spec.draft_vocab_size is not None:  # as EAGLE-3's checkpoints hold them: id - row, and membership
            self.register_buffer("d2t", torch.zeros(spec.draft_vocab_size, dtype=torch.int64))
            self.register_buffer("t2d", torch.zeros(spec.vocab_size, dtype=torch.bool))

    def set_vocabulary(self, token_ids: Tensor) -> None:
        """Choose the tokens that a draft with a reduced vocabulary can guess: (V',) distinct ids."""
        ids = token_ids.sort().values
        self.d2t.copy_(ids - torch.arange(len(ids)))
        self.t2d.zero_()[ids] = True

    @property
    def token_ids(self) -> Tensor:
        """(V',) ascending: what a draft with a reduced vocabulary can guess."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def head(self, head: Head) -> Head:
        """The part of the target's head that the draft uses: all of it, or the rows of its vocabulary."""
        return head if self.spec.draft_vocab_size is None else head.only(self.token_ids)

    @property
    def _projects(self) -> bool:
        return self.spec.variant in ("dflash", "dspark")

    def confidence(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Logit of the acceptance of each slot's token: (..., D) states and (...) tokens before them -> (...)."""
        return self.confidence_head(hidden, self.markov_head.markov_w1(previous) if self.spec.markov_head else None)

    def logits(self, head: Head, hidden: Tensor, latent: Tensor | None = None) -> Tensor:
        """(R, V') of rows of final-normed states (R, D), corrected by a Markov head's latents (R, r) where given."""
        products = head.products(hidden.contiguous())
        return head.cap(products if latent is None else products + self.markov_head.correction(latent, products.dtype))

    def layer_mix(self) -> Tensor | None:
        """(L, T), or (1, T) of a gate: the share of each tapped layer in what a layer reads; None where fc mixes."""
        return None if self._projects else self.layer_fusion_weights.float().softmax(-1)

    def mix_entropy(self) -> Tensor:
        """Entropy of the layer mix in nats, averaged over its rows: log T where all weigh alike, 0 for a choice."""
        return torch.special.entr(self.layer_mix()).sum(-1).mean()

    def layer_order(self) -> list[int]:
        """The tapped layers by their share in the mix, the largest first; what a gate proposes."""
        shares = self.layer_mix().mean(0).tolist()
        return [layer for _, layer in sorted(zip(shares, self.spec.target_layer_ids), key=lambda pair: -pair[0])]

    def contexts(self, features: Tensor) -> list[Tensor]:
        """What each of the L layers reads of the target: (N, S, T*D_target) -> (N, S, D) each."""
        count = self.spec.num_hidden_layers
        if self._projects:
            return [self.hidden_norm(self.fc(features))] * count
        states = features.unflatten(-1, (len(self.spec.target_layer_ids), -1))
        if self.spec.variant == "gated":  # the residual stream grows with depth; a share should not make up for that
            states = F.rms_norm(states, states.shape[-1:], eps=self.spec.rms_norm_eps)
        mixes = [torch.einsum("nstd,t->nsd", states, row) for row in self.layer_mix().to(states.dtype)]
        contexts = [self.hidden_norm(mix) for mix in mixes]
        return contexts if len(contexts) == count else contexts * count

    def forward(self, features: Tensor, embeds: Tensor, anchors: Tensor) -> Tensor:
        """Training forward: every block of every sequence at once.

        Args:
            features: (N, S, T*D_target) tapped layers; a block reads those strictly before its anchor.
            embeds: (N, A, B, D) the target's embeddings of the blocks' tokens.
            anchors: (N, A) int64; padding anchors stand at 0 and so see no context.

        Returns:
            (N, A, B, D) final-normed hidden states, ready for the target's head.
        """
        count, anchor_count, block_size, _ = embeds.shape
        attend = _backend(self.attention, features.device)(anchors, features.shape[1], block_size)
        x = embeds.flatten(1, 2)
        here = rotary(self.rope, blocks.block_positions(anchors, block_size).flatten(1))
        there = rotary(self.rope, torch.arange(features.shape[1], device=features.device)[None])
        for layer, context in zip(self.layers, self.contexts(features), strict=True):
            context_kv = layer.self_attn.keys_values(context, there, context=True)
            x = layer(x, here, lambda q, k, v, kv=context_kv: attend(q, *kv, k, v))
        return self.norm(x).view(count, anchor_count, block_size, -1)

    def start(self, max_length: int, batch: int = 1) -> KVCache:
        """An empty cache for decoding up to `max_length` committed tokens; room for a block behind them."""
        weight = self.norm.weight
        length = max_length + self.spec.block_size
        return KVCache(self.spec, batch, length, dtype=weight.dtype, device=weight.device)

    def extend(self, cache: KVCache, features: Tensor) -> None:
        """Append the features of committed tokens (N, n, T*D_target) to the cache."""
        rope = rotary(self.rope, cache.positions(features.shape[1]))
        for layer, context, kept in zip(self.layers, self.contexts(features), cache.layers, strict=True):
            k, v = layer.self_attn.keys_values(context, rope, context=True)
            kept.update(k.transpose(1, 2), v.transpose(1, 2))

    def propose(self, cache: KVCache, embeds: Tensor) -> Tensor:
        """Draft the block whose anchor stands right after the cached context of each row.

        Args:
            cache: context of all positions before the anchor; unchanged.
            embeds: (N, B, D) the target's embeddings of [anchor, MASK x (B-1)].

        Returns:
            (N, B, D) final-normed hidden states.
        """
        size = embeds.shape[1]
        positions, mask = cache.positions(size), None
        if cache.behind is not None:
            mask = torch.arange(cache.length + size, device=embeds.device) <= positions[:, None, None, -1:]
        rope, x = rotary(self.rope, positions), embeds
        for layer, kept in zip(self.layers, cache.layers, strict=True):

            def attend(q: Tensor, k: Tensor, v: Tensor, kept: CacheLayerMixin = kept) -> Tensor:
                # The block's own keys go behind the context for this call; the next one overwrites them.
                keys, values = kept.update(k.transpose(1, 2), v.transpose(1, 2))
                kept.crop(size)
                grouped = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, mask, enable_gqa=True)
                return grouped.transpose(1, 2)

            x = layer(x, rope, attend)
        return self.norm(x)

    def disconnect(self) -> None:
        """Tell the draft nothing of the target's states, now and in training: an ablation."""
        nn.init.zeros_(self.fc.weight.requires_grad_(False))

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """Small random weights: normal with std 0.02, norms 1 (the published drafts' `initializer_range`).

        Of DFlare's layers the first listen to the first tapped layers, the last to the last; a gate begins even.
        """
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            elif name == "layer_fusion_weights":
                count, taps = parameter.shape
                parameter.zero_()
                if self.spec.variant == "dflare":
                    parameter[range(count), [d * taps // count for d in range(count)]] = 2.0
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)


def _backend(name: str, device: torch.device):
    if name == "auto":
        name = "flex" if device.type == "cuda" else "split"
    return {"split": SplitAttention, "flex": FlexAttention, "dense": DenseAttention}[name]


class SplitAttention:
    """One softmax over two parts: context scores by sequence, in-block scores by block.

    The in-block part is (A, B, B) instead of (A*B, A*B), so nothing grows with the square of the anchors.
    """

    def __init__(self, anchors: Tensor, context: int, block_size: int) -> None:
        self.shape = (anchors.shape[1], block_size)
        queries = anchors.repeat_interleave(block_size, 1)
        # (N, 1, 1, A*B, S): True where the context is at or behind the anchor and must not be seen.
        self.hidden = (torch.arange(context, device=anchors.device) >= queries[..., None])[:, None, None]

    def __call__(self, q: Tensor, context_k: Tensor, context_v: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (N, A*B, heads, d); context k, v (N, S, kv heads, d); block k, v (N, A*B, kv heads, d)."""
        anchors, size = self.shape
        n, length, heads, d = q.shape
        context, groups = context_k.shape[1], k.shape[2]
        share = heads // groups
        q = (q / math.sqrt(d)).view(n, length, groups, share, d).permute(0, 2, 3, 1, 4)
        # Queries that share a key head are rows of one product: (N, groups, share*A*B, d) x (N, groups, d, S).
        far = q.reshape(n, groups, share * length, d) @ context_k.permute(0, 2, 3, 1)
        far = far.view(n, groups, share, length, context)
        with torch.no_grad():  # a hidden score's weight is 0, so softmax gives it no gradient anyway
            far.masked_fill_(self.hidden, -torch.inf)
        by_block = q.reshape(n, groups, share, anchors, size, d).transpose(2, 3).reshape(n, groups, anchors, -1, d)
        near = by_block @ k.view(n, anchors, size, groups, d).permute(0, 3, 1, 4, 2)
        near = near.view(n, groups, anchors, share, size, size).transpose(2, 3).reshape(n, groups, share, length, size)
        # In v's precision softmax still computes in float32, and has no float32 values to write and to read again.
        weights = torch.cat([far, near], dim=-1).softmax(-1).to(v.dtype)
        far, near = weights.split([context, size], dim=-1)
        out = far.reshape(n, groups, share * length, context) @ context_v.transpose(1, 2)
        near = near.reshape(n, groups, share, anchors, size, size).transpose(2, 3).reshape(n, groups, anchors, -1, size)
        local = near @ v.view(n, anchors, size, groups, d).permute(0, 3, 1, 2, 4)
        local = local.view(n, groups, anchors, share, size, d).transpose(2, 3).reshape(n, groups, share, length, d)
        out = out.view(n, groups, share, length, d) + local
        return out.permute(0, 3, 1, 2, 4).reshape(n, length, heads, d)


class DenseAttention:
    """The reference: SDPA with the full (A*B) x (S + A*B) mask."""

    def __init__(self, anchors: Tensor, context: int, block_size: int) -> None:
        self.mask = blocks.visible(anchors, context, block_size)[:, None]

    def __call__(self, q: Tensor, context_k: Tensor, context_v: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Shapes as in SplitAttention."""
        keys, values = torch.cat([context_k, k], 1), torch.cat([context_v, v], 1)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), attn_mask=self.mask, enable_gqa=True
        )
        return out.transpose(1, 2)


class FlexAttention:
    """FlexAttention with a block mask; compiled on CUDA, eager (for tests) elsewhere."""

    def __init__(self, anchors: Tensor, context: int, block_size: int) -> None:
        from torch.nn.attention.flex_attention import create_block_mask

        n, count = anchors.shape

        def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            # Queries are padded to the kernel's tile, so their block id must be kept in range.
            block = (query // block_size).clamp(max=count - 1)
            before = (key < context) & (key < anchors[batch, block])
            return before | ((key >= context) & ((key - context) // block_size == block))

        build = _compiled(create_block_mask) if anchors.is_cuda else create_block_mask
        length = count * block_size
        self.mask = build(mask, n, None, length, context + length, device=anchors.device)

    def __call__(self, q: Tensor, context_k: Tensor, context_v: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Shapes as in SplitAttention."""
        from torch.nn.attention.flex_attention import flex_attention

        attend, options = flex_attention, None
        if q.is_cuda:
            # Its kernel for few queries finds no tile where there are 2, 4, ... queries a key head (pytorch 185349).
            attend, options = _compiled(flex_attention), {"FORCE_USE_FLEX_ATTENTION": True}
        keys, values = torch.cat([context_k, k], 1), torch.cat([context_v, v], 1)
        out = attend(
            q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), block_mask=self.mask, enable_gqa=True,
            kernel_options=options,
        )  # fmt: skip
        return out.transpose(1, 2)


@cache
def _compiled(function):
    return torch.compile(function)
