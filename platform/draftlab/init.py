"""First weights of a draft: small random ones, or the target's own layers."""

from __future__ import annotations

import torch
from torch import Tensor

from draftlab.draft import Draft
from draftlab.errors import UserError
from draftlab.target import Target


COPIED = (
    "input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
    "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)
"""What a target's layer must have to be copied."""


def initialise(draft: Draft, target: Target, kind: str, seed: int, sample: Tensor) -> None:
    """Give a draft its first weights.

    Args:
        kind: `random` or `target_layers`.
        seed: of the random weights.
        sample: (N, S) int64, text of the corpus without padding; the target's query and key sizes are measured on it.

    Raises:
        UserError: a weight of the target's layers doesn't have the draft's shape.
    """
    draft.reset(seed)
    if kind == "target_layers":
        copy_target_layers(draft, target, sample)


def check_layers(target: Target) -> None:
    """Refuse a target whose layers can't be copied: without a norm before attention, or with a mixture of experts.

    Raises:
        UserError: naming what is missing.
    """
    for layer in target.model.get_decoder().layers:
        for name in COPIED:
            try:
                layer.get_submodule(name)
            except AttributeError:
                raise UserError(
                    f"draft.init=target_layers: a {type(layer).__name__} of {target.name} has no {name} to copy; "
                    "use draft.init=random"
                ) from None


@torch.no_grad()
def copy_target_layers(draft: Draft, target: Target, sample: Tensor) -> None:
    """Start from the target's last layers, so that attention, MLP and head already fit each other.

    - Every draft layer is one of the target's last layers. Its input norm's weights are folded into the projections,
      since the context is normed once for all layers (hidden_norm) and each layer expects its own weights there.
    - The draft norms queries and keys per head. A target that does so lends those weights; for one that doesn't,
      the norms' weight is the root mean square of its queries and keys over the sample, which keeps the attention's
      temperature.
    - fc, where there is one, passes the deepest tapped layer through; the final norm is the target's.
    """
    check_layers(target)
    spec = draft.spec
    decoder = target.model.get_decoder()
    chosen = list(decoder.layers)[-spec.num_hidden_layers :]
    scales = _head_scales(target, chosen, sample)
    for ours, theirs, (query_scale, key_scale) in zip(draft.layers, chosen, scales, strict=True):
        fold = _norm_weight(theirs.input_layernorm)
        for name in ("q_proj", "k_proj", "v_proj"):
            folded = getattr(theirs.self_attn, name).weight.float() * fold
            for name in (name, f"{name}_target"):  # DFlare's own projections of the context begin alike
                if hasattr(ours.self_attn, name):
                    _copy(getattr(ours.self_attn, name).weight, folded)
        _copy(ours.self_attn.o_proj.weight, theirs.self_attn.o_proj.weight)
        for norm, scale in ((ours.self_attn.q_norm, query_scale), (ours.self_attn.k_norm, key_scale)):
            _copy(norm.weight, scale)
        # Gemma norms the MLP's input by `pre_feedforward_layernorm`; elsewhere it is the post-attention norm.
        before_mlp = getattr(theirs, "pre_feedforward_layernorm", None) or theirs.post_attention_layernorm
        _copy(ours.post_attention_layernorm.weight, _norm_weight(before_mlp))
        for name in ("gate_proj", "up_proj", "down_proj"):
            _copy(getattr(ours.mlp, name).weight, getattr(theirs.mlp, name).weight)
    _copy(draft.norm.weight, _norm_weight(decoder.norm))
    if hasattr(draft, "fc"):
        width, deepest = spec.target_hidden_size, spec.target_layer_ids.index(max(spec.target_layer_ids))
        draft.fc.weight.zero_()
        draft.fc.weight[:, deepest * width : (deepest + 1) * width].copy_(torch.eye(spec.hidden_size, width))


def _copy(ours: Tensor, theirs: Tensor) -> None:
    if ours.shape != theirs.shape:
        raise UserError(
            f"draft.init=target_layers: a draft weight of shape {tuple(ours.shape)} can't be copied from the target's "
            f"{tuple(theirs.shape)}; use draft.init=random"
        )
    ours.copy_(theirs)


def _norm_weight(norm: torch.nn.Module) -> Tensor:
    """What a norm multiplies by; gemma stores it less 1, so it is measured on a vector of ones."""
    weight = norm.weight
    return norm(torch.ones_like(weight)[None])[0].float() * (1 + norm_eps(norm)) ** 0.5


def norm_eps(norm: torch.nn.Module) -> float:
    """The epsilon of any of transformers' RMS norms."""
    return float(getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", 0.0))


def _head_scales(target: Target, layers: list[torch.nn.Module], sample: Tensor) -> list[tuple[Tensor, Tensor]]:
    """For each layer the weights (head_dim,) of the draft's query and key norms."""
    size = getattr(target.config, "head_dim", None) or target.hidden_size // target.config.num_attention_heads
    seen: dict[torch.nn.Module, Tensor] = {}

    def keep(module: torch.nn.Module, inputs: object, output: Tensor) -> None:
        seen[module] = output.float().unflatten(-1, (-1, size)).square().mean().sqrt()

    hooks = []
    for layer in layers:
        if not hasattr(layer.self_attn, "q_norm"):
            hooks += [p.register_forward_hook(keep) for p in (layer.self_attn.q_proj, layer.self_attn.k_proj)]
    if hooks:
        try:
            lengths = torch.full((len(sample),), sample.shape[1], device=target.device)
            target.tapped(sample.to(target.device), lengths, (), last_hidden=True)
        finally:
            for hook in hooks:
                hook.remove()

    def scale(attention: torch.nn.Module, kind: str) -> Tensor:
        if hasattr(attention, f"{kind}_norm"):
            return _norm_weight(getattr(attention, f"{kind}_norm"))
        return seen[getattr(attention, f"{kind}_proj")].expand(size)

    return [(scale(layer.self_attn, "q"), scale(layer.self_attn, "k")) for layer in layers]
