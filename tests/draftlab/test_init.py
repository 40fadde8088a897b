"""First weights: what is copied from the target behaves in the draft as it did there."""

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Olmo2Config,
    Olmo2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from draftlab.config import DraftConfig, TargetConfig
from draftlab.draft import Draft, adapt
from draftlab.errors import UserError
from draftlab.init import check_layers, initialise
from draftlab.target import Target, load_target


@pytest.fixture(scope="module")
def tiny():
    return load_target(TargetConfig(model="tiny", dtype="float32", device="cpu"))


def another(tiny, architecture, config, **changes):
    """A random target of another architecture, with the tiny one's tokenizer; no norm's weight is 1."""
    shape = dict(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128, tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = architecture(config(**{**shape, **changes}))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.add_(0.3 * torch.randn(weight.shape))
            else:
                weight.mul_(5)
    return Target(model, tiny.tokenizer, "another")


def sample(target, rows=3, length=11):
    return torch.randint(0, 250, (rows, length), generator=torch.Generator().manual_seed(1))


def started(target, kind="target_layers", layers=2, taps=(0, 2), seed=0):
    chosen = DraftConfig(block_size=4, num_hidden_layers=layers, target_layer_ids=list(taps), init=kind)
    draft = Draft(adapt(target.config, chosen, target.mask_token_id))
    initialise(draft, target, kind, seed, sample(target))
    return draft.requires_grad_(False)


def states(target, count=7):
    return torch.randn(2, count, target.hidden_size, generator=torch.Generator().manual_seed(2))


def test_random_weights_are_small_and_norms_are_one(tiny):
    draft = started(tiny, "random")
    for name, weight in draft.named_parameters():
        if "norm" in name:
            assert weight.eq(1).all()
        else:
            assert weight.std().item() == pytest.approx(0.02, rel=0.15)
            assert abs(weight.mean().item()) < 0.002


@pytest.mark.parametrize("kind", ["random", "target_layers"])
def test_first_weights_repeat_and_leave_the_target_alone(tiny, kind):
    before = {name: weight.clone() for name, weight in tiny.model.named_parameters()}
    first, again = started(tiny, kind), started(tiny, kind)
    assert all(a.equal(b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert all(weight.equal(before[name]) for name, weight in tiny.model.named_parameters())
    assert all(not layer._forward_hooks for layer in tiny.model.modules())
    random = started(tiny, "random", seed=1)
    assert not random.fc.weight.equal(started(tiny, "random").fc.weight)


def test_layers_are_the_targets_last_with_their_input_norm_folded_in(tiny):
    target = another(tiny, Qwen3ForCausalLM, Qwen3Config)
    draft = started(target, layers=3)
    x = states(target)
    for ours, theirs in zip(draft.layers, target.model.get_decoder().layers[-3:], strict=True):
        assert ours.input_layernorm.weight.eq(1).all()
        y, z = ours.input_layernorm(x), theirs.input_layernorm(x)
        for name in ("q_proj", "k_proj", "v_proj"):
            copied, original = getattr(ours.self_attn, name)(y), getattr(theirs.self_attn, name)(z)
            torch.testing.assert_close(copied, original, rtol=1e-4, atol=1e-4)
        assert ours.self_attn.o_proj.weight.equal(theirs.self_attn.o_proj.weight)
        copied = ours.mlp(ours.post_attention_layernorm(x))
        torch.testing.assert_close(copied, theirs.mlp(theirs.post_attention_layernorm(x)), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(draft.norm(x), target.model.get_decoder().norm(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("taps", [(0, 2), (2, 0), (1,)])
def test_the_context_is_the_deepest_tapped_layer_normed_once(tiny, taps):
    draft = started(tiny, taps=taps)
    tapped = {layer: states(tiny) + layer for layer in taps}
    context = draft.hidden_norm(draft.fc(torch.cat([tapped[layer] for layer in taps], dim=-1)))
    deepest = tapped[max(taps)]
    expected = deepest / (deepest.pow(2).mean(-1, keepdim=True) + draft.spec.rms_norm_eps).sqrt()
    torch.testing.assert_close(context, expected, rtol=1e-5, atol=1e-5)
    layer = tiny.model.get_decoder().layers[-1]
    keys = layer.self_attn.k_proj(layer.input_layernorm(deepest))
    torch.testing.assert_close(draft.layers[-1].self_attn.k_proj(context), keys, rtol=1e-4, atol=1e-4)


def test_a_copied_last_layer_repeats_the_targets_own_output(tiny):
    """Fed with the target's states before its last layer, one slot at every position, the draft is that layer."""
    target = another(tiny, Qwen3ForCausalLM, Qwen3Config)
    draft = started(target, layers=1, taps=(2,))
    ids = sample(target)
    features, last = target.tapped(ids, torch.full((3,), 11), (2,), last_hidden=True)
    everywhere = torch.arange(11).expand(3, -1)
    hidden = draft(features, features[:, :, None], everywhere)
    torch.testing.assert_close(hidden[:, :, 0], last, rtol=1e-4, atol=1e-4)


def test_head_norms_of_a_target_without_them_are_the_sizes_of_its_queries_and_keys(tiny):
    draft = started(tiny, layers=2)
    hidden = tiny.model(sample(tiny), output_hidden_states=True).hidden_states
    for i, ours in zip((2, 3), draft.layers, strict=True):
        layer = tiny.model.get_decoder().layers[i]
        x = layer.input_layernorm(hidden[i])
        for norm, projection in (("q_norm", "q_proj"), ("k_norm", "k_proj")):
            size = getattr(layer.self_attn, projection)(x).pow(2).mean().sqrt()
            weight = getattr(ours.self_attn, norm).weight
            torch.testing.assert_close(weight, size.expand_as(weight), rtol=1e-4, atol=1e-5)


def test_head_norms_of_a_target_that_has_them_are_copied(tiny):
    target = another(tiny, Qwen3ForCausalLM, Qwen3Config)
    for ours, theirs in zip(started(target).layers, target.model.get_decoder().layers[-2:], strict=True):
        for name in ("q_norm", "k_norm"):
            copied, original = getattr(ours.self_attn, name), getattr(theirs.self_attn, name)
            torch.testing.assert_close(copied.weight, original.weight, rtol=1e-5, atol=1e-6)


def test_a_gemma_targets_norms_are_one_plus_their_weight(tiny):
    target = another(tiny, Gemma3ForCausalLM, Gemma3TextConfig, sliding_window=64)
    draft = started(target)
    decoder = target.model.get_decoder()
    torch.testing.assert_close(draft.norm.weight, 1 + decoder.norm.weight, rtol=1e-5, atol=1e-5)
    x = states(target)
    for ours, theirs in zip(draft.layers, decoder.layers[-2:], strict=True):
        torch.testing.assert_close(
            ours.self_attn.k_norm.weight, 1 + theirs.self_attn.k_norm.weight, rtol=1e-5, atol=1e-5
        )
        torch.testing.assert_close(
            ours.self_attn.q_proj(ours.input_layernorm(x)), theirs.self_attn.q_proj(theirs.input_layernorm(x)),
            rtol=1e-4, atol=1e-4,
        )
        torch.testing.assert_close(
            ours.post_attention_layernorm(x), theirs.pre_feedforward_layernorm(x), rtol=1e-4, atol=1e-4
        )


def test_layers_of_another_build_are_refused_in_one_line(tiny):
    target = another(tiny, Olmo2ForCausalLM, Olmo2Config, head_dim=8, eos_token_id=2)
    with pytest.raises(UserError, match="no input_layernorm to copy; use draft.init=random"):
        check_layers(target)
    with pytest.raises(UserError, match="Olmo2DecoderLayer"):
        started(target)
    started(target, "random")
    check_layers(tiny)


def test_a_targets_shape_that_differs_is_refused_in_one_line(tiny):
    draft = Draft(adapt(another(tiny, Qwen3ForCausalLM, Qwen3Config).config, DraftConfig(target_layer_ids=[0]), 3))
    with pytest.raises(UserError, match="shape"):
        initialise(draft, tiny, "target_layers", 0, sample(tiny))
