"""The draft against an oracle that computes one slot of one block at a time, and against its own cached form.

The oracle is written from the definition: a block sees the context strictly before its anchor and all of itself, keys
and values of both come from the same projections, positions are absolute.
"""

import math

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig, PhiConfig, Qwen3Config
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi.modeling_phi import PhiRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

from draftlab import blocks, config
from draftlab.config import DraftConfig
from draftlab.draft import Draft, adapt, choose_layer_ids, rope_of, rotary, rotate, uniform_layer_ids
from draftlab.errors import UserError

WIDTH, TAPS, VOCABULARY = 24, (0, 2), 50


def llama(**changes):
    shape = dict(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=40, num_hidden_layers=5, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True,
    )
    return LlamaConfig(**{**shape, **changes})


def chosen(**changes):
    return DraftConfig(**{"num_hidden_layers": 2, "target_layer_ids": list(TAPS), "init": "random", **changes})


def random_draft(attention="split", target=None, seed=0, **changes):
    """A draft none of whose weights is special: norms are not 1, and logits are far from 0."""
    draft = Draft(adapt(target or llama(), chosen(**changes), mask_token_id=3), attention)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in draft.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.3 * noise if "norm" in name else 0.3 * noise)
    return draft.requires_grad_(False)


def inputs(batch, context, anchors, block_size, seed=0):
    """Features (N, S, T*D), block embeddings (N, A, B, D) and random anchors (N, A) in 0..S."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(batch, context, len(TAPS) * WIDTH, generator=generator)
    embeds = torch.randn(batch, anchors, block_size, WIDTH, generator=generator)
    return features, embeds, torch.randint(0, context + 1, (batch, anchors), generator=generator)


def norm(x, weight, eps):
    return x / (x.pow(2).mean() + eps).sqrt() * weight


def turn(x, position, spec):
    """RoPE of one head vector, pair by pair."""
    half, out = len(x) // 2, x.clone()
    for i in range(half):
        angle = position * spec.rope_parameters["rope_theta"] ** (-2 * i / len(x))
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def read(w, spec, feature, layer):
    """What a draft layer reads of the target at one position, before the norm: (T*D,) -> (D,)."""
    if spec.variant == "dflash":
        return w["fc.weight"] @ feature
    taps = list(feature.split(spec.target_hidden_size))
    if spec.variant == "gated":
        taps, layer = [norm(tap, torch.ones(()), spec.rms_norm_eps) for tap in taps], 0
    shares = [math.exp(x) for x in w["layer_fusion_weights"][layer].tolist()]
    return sum(share / sum(shares) * tap for share, tap in zip(shares, taps))


def oracle(draft, features, embeds, anchor):
    """One block in float64: features (S, T*D), embeds (B, D) -> (B, D)."""
    spec, size = draft.spec, draft.spec.head_dim
    w = {name: weight.double() for name, weight in draft.state_dict().items()}
    eps = spec.rms_norm_eps
    states = list(embeds.double())
    for i in range(spec.num_hidden_layers):
        get = lambda name, i=i: w[f"layers.{i}.{name}.weight"]  # noqa: E731
        context = [norm(read(w, spec, f, i), w["hidden_norm.weight"], eps) for f in features.double()[:anchor]]
        normed = [norm(x, get("input_layernorm"), eps) for x in states]
        own = "_target" if spec.variant == "dflare" else ""
        places = [*((position, x, own) for position, x in enumerate(context)),
                  *((position, x, "") for position, x in enumerate(normed, start=anchor))]
        keys, values = [], []
        for position, x, which in places:
            k = (get(f"self_attn.k_proj{which}") @ x).view(-1, size)
            keys.append([turn(norm(head, get("self_attn.k_norm"), eps), position, spec) for head in k])
            values.append((get(f"self_attn.v_proj{which}") @ x).view(-1, size))
        after = []
        for slot, x in enumerate(normed):
            heads = []
            for h, q in enumerate((get("self_attn.q_proj") @ x).view(-1, size)):
                q = turn(norm(q, get("self_attn.q_norm"), eps), anchor + slot, spec)
                shared = h * spec.num_key_value_heads // spec.num_attention_heads
                scores = torch.stack([q @ k[shared] for k in keys]) / math.sqrt(size)
                heads.append(sum(p * v[shared] for p, v in zip(scores.softmax(0), values)))
            x = states[slot] + get("self_attn.o_proj") @ torch.cat(heads)
            y = norm(x, get("post_attention_layernorm"), eps)
            gate, up = get("mlp.gate_proj") @ y, get("mlp.up_proj") @ y
            after.append(x + get("mlp.down_proj") @ (gate * gate.sigmoid() * up))
        states = after
    return torch.stack([norm(x, w["norm.weight"], eps) for x in states])


# ---- shape and adaptation


@pytest.mark.parametrize(
    "count, depth, ids",
    [(5, 36, (1, 9, 17, 25, 33)), (1, 36, (18,)), (1, 4, (2,)), (5, 30, (1, 8, 14, 20, 27)), (2, 30, (1, 27))],
)
def test_the_uniform_layer_choice_is_the_published_formula(count, depth, ids):
    assert uniform_layer_ids(count, depth) == ids


@pytest.mark.parametrize("depth", [4, 5, 30, 36])
def test_as_many_layers_as_a_target_has_to_spread_over_and_no_more(depth):
    target = llama(num_hidden_layers=depth)
    most = DraftConfig(num_hidden_layers=1, num_target_layers=depth - 3)
    assert len(adapt(target, most, 0).target_layer_ids) == depth - 3
    with pytest.raises(UserError, match=f"a target of {depth} layers has {depth - 3} to spread over"):
        adapt(target, DraftConfig(num_hidden_layers=1, num_target_layers=depth - 2), 0)


def test_controls_are_as_many_layers_from_one_end_the_middle_or_anywhere():
    assert choose_layer_ids("uniform", 5, 36) == (1, 9, 17, 25, 33)
    assert choose_layer_ids("early", 3, 30) == (0, 1, 2)
    assert choose_layer_ids("middle", 3, 30) == (13, 14, 15)
    assert choose_layer_ids("late", 3, 30) == (26, 27, 28)  # the last, 29, can't be tapped
    draws = [choose_layer_ids(choice, 5, 30) for choice in ("random", "random0", "random1")]
    assert draws[0] == draws[1] != draws[2]
    assert all(len(set(ids)) == 5 and list(ids) == sorted(ids) and ids[-1] < 29 for ids in draws)
    with pytest.raises(UserError, match="at most 29 of the target's layers, got 40"):
        choose_layer_ids("late", 40, 30)


def test_a_llama_like_target_is_adapted():
    target = llama(rope_parameters={"rope_type": "default", "rope_theta": 5e5}, rms_norm_eps=1e-5)
    spec = adapt(target, DraftConfig(block_size=8, num_hidden_layers=2, target_layer_ids=[2, 0]), mask_token_id=7)
    assert (spec.block_size, spec.mask_token_id, spec.target_layer_ids) == (8, 7, (2, 0))
    assert (spec.target_num_hidden_layers, spec.target_hidden_size, spec.num_hidden_layers) == (5, WIDTH, 2)
    assert (spec.hidden_size, spec.intermediate_size, spec.vocab_size) == (WIDTH, 40, VOCABULARY)
    assert (spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim) == (4, 2, 6)
    assert spec.rope_parameters == {"rope_type": "default", "rope_theta": 5e5}
    assert (spec.rms_norm_eps, spec.max_position_embeddings, spec.tie_word_embeddings) == (1e-5, 512, True)
    assert (spec.hidden_act, spec.label_layout) == ("silu", "same")


def test_a_target_without_grouped_heads_is_adapted():
    spec = adapt(llama(num_key_value_heads=None), chosen(), mask_token_id=3)
    assert spec.num_key_value_heads == spec.num_attention_heads == 4


def test_a_qwen3_like_target_keeps_its_own_head_size():
    target = Qwen3Config(
        hidden_size=WIDTH, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=40, vocab_size=VOCABULARY, tie_word_embeddings=False, max_position_embeddings=512,
    )
    draft = random_draft(target=target)
    assert draft.spec.head_dim == 16 and not draft.spec.tie_word_embeddings
    assert draft.layers[0].self_attn.q_proj.weight.shape == (64, WIDTH)
    assert draft.layers[0].self_attn.k_proj.weight.shape == (32, WIDTH)


def test_a_gemma3_like_target_lends_its_full_attention_rope():
    target = Gemma3TextConfig(
        hidden_size=WIDTH, num_hidden_layers=7, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=40, vocab_size=VOCABULARY,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        },
    )
    spec = adapt(target, chosen(), mask_token_id=3)
    assert spec.rope_parameters == {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    assert (spec.head_dim, spec.hidden_act) == (8, "silu")


@pytest.mark.parametrize(
    "changes, said",
    [
        (dict(target_layer_ids=[0, 4]), "last layer"),
        (dict(target_layer_ids=[0, 5]), "got 5"),
        (dict(target_layer_ids=[-1]), "got -1"),
        (dict(target_layer_ids=[1, 1]), "more than once"),
        (dict(target_layer_ids=[]), "at least one"),
        (dict(target_layer_ids=None, num_target_layers=4), "has 2 to spread over"),
        (dict(mask_token_id=VOCABULARY), f"below the target's {VOCABULARY}"),
        (dict(mask_token_id=-1), "got -1"),
        (dict(init="target_layers", num_hidden_layers=6), "6 draft layers"),
        (dict(init="target_layers", intermediate_size=8), "40"),
    ],
)
def test_a_choice_that_the_target_cannot_bear_is_refused(changes, said):
    with pytest.raises(UserError, match=said):
        adapt(llama(), chosen(**changes), mask_token_id=3)


def test_a_mask_that_the_user_chose_beats_the_found_one():
    assert adapt(llama(), chosen(mask_token_id=0), mask_token_id=3).mask_token_id == 0


def test_the_papers_recipe_builds_its_draft():
    run = config.load(config.CONFIGS / "qwen3_8b.yaml")
    target = Qwen3Config(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, tie_word_embeddings=False,
    )
    spec = adapt(target, run.draft, mask_token_id=0)
    assert (spec.target_layer_ids, spec.block_size, spec.mask_token_id) == ((1, 9, 17, 25, 33), 16, 151669)
    assert (run.gamma, run.train.anchors, run.train.lr, run.corpus.max_length) == (7.0, 512, 6e-4, 3072)
    with torch.device("meta"):
        draft = Draft(spec)
    layer = {
        "self_attn.q_proj": (4096, 4096), "self_attn.k_proj": (1024, 4096), "self_attn.v_proj": (1024, 4096),
        "self_attn.o_proj": (4096, 4096), "self_attn.q_norm": (128,), "self_attn.k_norm": (128,),
        "mlp.gate_proj": (12288, 4096), "mlp.up_proj": (12288, 4096), "mlp.down_proj": (4096, 12288),
        "input_layernorm": (4096,), "post_attention_layernorm": (4096,),
    }
    expected = {f"layers.{i}.{name}.weight": shape for i in range(5) for name, shape in layer.items()}
    expected |= {"fc.weight": (4096, 5 * 4096), "hidden_norm.weight": (4096,), "norm.weight": (4096,)}
    assert {name: tuple(weight.shape) for name, weight in draft.state_dict().items()} == expected
    count = sum(parameter.numel() for parameter in draft.parameters())
    assert count == sum(math.prod(shape) for shape in expected.values())
    assert 1.0e9 < count < 1.1e9


# ---- the variants


def test_dflares_weights_are_named_as_published():
    """AngelSlim's QwenDFlareDraftModel: no fc, a mix for every layer, projections of the context of its own."""
    draft = random_draft(variant="dflare", num_hidden_layers=3)
    shapes = {name: tuple(weight.shape) for name, weight in draft.state_dict().items()}
    dflash = {name: tuple(weight.shape) for name, weight in random_draft(num_hidden_layers=3).state_dict().items()}
    del dflash["fc.weight"]
    own = {f"layers.{i}.self_attn.{kind}_proj_target.weight": (12, WIDTH) for i in range(3) for kind in "kv"}
    assert shapes == dflash | own | {"layer_fusion_weights": (3, len(TAPS))}


def test_dflares_layers_begin_with_the_tapped_layers_in_order():
    target = llama(num_hidden_layers=13)
    draft = Draft(adapt(target, chosen(variant="dflare", num_hidden_layers=3, target_layer_ids=list(range(7))), 3))
    draft.reset(0)
    expected = torch.zeros(3, 7)
    for layer, tap in ((0, 0), (1, 2), (2, 4)):
        expected[layer, tap] = 2
    assert draft.layer_fusion_weights.equal(expected)
    torch.testing.assert_close(draft.layer_mix().sum(1), torch.ones(3))


def test_a_gate_begins_even_and_orders_the_tapped_layers_by_their_share():
    draft = Draft(adapt(llama(), chosen(variant="gated", target_layer_ids=[2, 0, 3]), 3))
    draft.reset(0)
    assert draft.mix_entropy().item() == pytest.approx(math.log(3))
    with torch.no_grad():
        draft.layer_fusion_weights.copy_(torch.tensor([[0.0, 1.0, 2.0]]))
    assert draft.layer_order() == [3, 0, 2]
    shares = [math.exp(x) / sum(map(math.exp, range(3))) for x in range(3)]
    assert draft.mix_entropy().item() == pytest.approx(-sum(share * math.log(share) for share in shares))


def test_a_gates_share_does_not_hang_on_how_large_a_tapped_layer_is():
    draft = random_draft(variant="gated")
    features, embeds, anchors = inputs(1, 9, 2, 4)
    larger = features.clone()
    larger[..., WIDTH:] *= 50
    torch.testing.assert_close(draft(features, embeds, anchors), draft(larger, embeds, anchors), rtol=1e-3, atol=1e-3)


def heads_by_hand(kind, weights, states, tokens):
    """A Markov head's correction along one block, slot by slot from the DSpark paper's eq. 5 and 6."""
    w = {name: weight.double() for name, weight in weights.items()}
    rank, found = w["markov_w1.weight"].shape[1], []
    state = torch.zeros(rank, dtype=torch.float64)
    for h, token in zip(states.double(), tokens.tolist()):
        latent = w["markov_w1.weight"][token]
        if kind == "gated":
            gate = w["gate_proj.weight"] @ torch.cat([h, latent]) + w["gate_proj.bias"]
            latent = gate.sigmoid() * latent
        if kind == "rnn":
            z = w["joint_proj.weight"] @ torch.cat([state, latent, h]) + w["joint_proj.bias"]
            keep = z[:rank].sigmoid()
            state = keep * state + (1 - keep) * z[rank : 2 * rank].tanh()
            latent = z[2 * rank :].tanh()
        found.append(w["markov_w2.weight"] @ latent)
    return torch.stack(found)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_a_markov_head_corrects_a_block_as_defined_at_once_and_slot_by_slot(kind):
    draft = random_draft(variant="dspark", markov_head=kind, markov_rank=5)
    assert (draft.spec.label_layout, draft.spec.first_slot, draft.spec.drafted_tokens) == ("next", 0, 16)
    generator = torch.Generator().manual_seed(4)
    states, tokens = torch.randn(2, 6, WIDTH, generator=generator), torch.randint(0, VOCABULARY, (2, 6))
    at_once = draft.markov_head(states, tokens) @ draft.markov_head.markov_w2.weight.T
    for n in range(2):
        expected = heads_by_hand(kind, draft.markov_head.state_dict(), states[n], tokens[n])
        torch.testing.assert_close(at_once[n].double(), expected, rtol=1e-4, atol=1e-4)
        state = None
        for k in range(6):
            latent, state = draft.markov_head.step(states[n, k], tokens[n, k], state)
            torch.testing.assert_close(draft.markov_head.markov_w2(latent), at_once[n, k], rtol=1e-4, atol=1e-5)


# ---- rope


def scaled(kind, **values):
    return {"rope_type": kind, "rope_theta": 1e4, **values}


ROPES = {
    "default": (llama(), LlamaRotaryEmbedding),
    "linear": (llama(rope_parameters=scaled("linear", factor=4.0)), LlamaRotaryEmbedding),
    "llama3": (
        llama(
            rope_parameters=scaled(
                "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=128
            )
        ),
        LlamaRotaryEmbedding,
    ),
    "yarn": (
        Qwen3Config(
            hidden_size=WIDTH, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_hidden_layers=5,
            max_position_embeddings=512,
            rope_parameters=scaled("yarn", factor=4.0, original_max_position_embeddings=128),
        ),
        Qwen3RotaryEmbedding,
    ),
    "partial": (
        PhiConfig(
            hidden_size=64, num_attention_heads=4, num_hidden_layers=5, max_position_embeddings=512,
            rope_parameters=scaled("default", partial_rotary_factor=0.5),
        ),
        PhiRotaryEmbedding,
    ),
    "partial linear": (
        PhiConfig(
            hidden_size=64, num_attention_heads=4, num_hidden_layers=5, max_position_embeddings=512,
            rope_parameters=scaled("linear", factor=2.0, partial_rotary_factor=0.5),
        ),
        PhiRotaryEmbedding,
    ),
    "gemma3 global": (
        Gemma3TextConfig(
            hidden_size=WIDTH, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_hidden_layers=7,
            rope_parameters={
                "sliding_attention": scaled("default"),
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            },
        ),
        Gemma3RotaryEmbedding,
    ),
}


@pytest.mark.parametrize("kind", ROPES)
def test_the_rope_is_the_targets_own(kind):
    target, module = ROPES[kind]
    if not hasattr(target, "rms_norm_eps"):
        target.rms_norm_eps = 1e-6  # phi's norms are another kind; only its rope is wanted here
    spec = adapt(target, chosen(), mask_token_id=3)
    positions = torch.tensor([[0, 1, 2, 17, 127, 128, 129, 400, 511]])
    extra = ("full_attention",) if kind == "gemma3 global" else ()
    cos, sin = module(target)(torch.zeros(1), positions, *extra)
    ours = rotary(rope_of(spec), positions)
    torch.testing.assert_close(ours, (cos, sin), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("size", [8, 4])
def test_rotation_equals_transformers_and_leaves_the_rest_of_a_partial_head(size):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 3, 8, generator=generator)  # (N, P, heads, head_dim)
    angles = torch.rand(2, 5, size // 2, generator=generator).repeat(1, 1, 2)
    turned = rotate(x, angles.cos(), angles.sin())
    theirs, _ = apply_rotary_pos_emb(
        x[..., :size].transpose(1, 2), x[..., :size].transpose(1, 2), angles.cos(), angles.sin()
    )
    torch.testing.assert_close(turned[..., :size], theirs.transpose(1, 2))
    assert turned[..., size:].equal(x[..., size:])


# ---- the training forward


@pytest.mark.parametrize("variant", ["dflash", "dflare", "gated"])
@pytest.mark.parametrize("attention", ["split", "dense", "flex"])
@pytest.mark.parametrize("block_size, context", [(2, 0), (3, 1), (4, 6)])
def test_every_backend_equals_the_oracle(variant, attention, block_size, context):
    draft = random_draft(attention, variant=variant)
    features, embeds, anchors = inputs(2, context, 3, block_size)
    hidden = draft(features, embeds, anchors)
    assert hidden.shape == embeds.shape
    for n in range(2):
        for j in range(3):
            expected = oracle(draft, features[n], embeds[n, j], int(anchors[n, j]))
            torch.testing.assert_close(hidden[n, j].double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("block_size, context, anchors", [(2, 1, 1), (4, 0, 2), (5, 30, 7), (16, 150, 9)])
@pytest.mark.parametrize("heads", [(4, 1), (4, 2), (4, 4)])
def test_split_and_flex_equal_the_dense_reference(block_size, context, anchors, heads):
    target = llama(num_attention_heads=heads[0], num_key_value_heads=heads[1])
    features, embeds, where = inputs(2, context, anchors, block_size)
    split, flex, dense = (
        random_draft(attention, target)(features, embeds, where) for attention in ("split", "flex", "dense")
    )
    torch.testing.assert_close(split, dense, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(flex, dense, rtol=1e-5, atol=2e-5)


def test_the_split_backends_gradients_equal_the_dense_ones():
    features, embeds, anchors = inputs(2, 9, 4, 5)
    pull = torch.randn(embeds.shape, generator=torch.Generator().manual_seed(1))
    gradients = []
    for attention in ("split", "dense"):
        draft = random_draft(attention).requires_grad_()
        features_, embeds_ = features.clone().requires_grad_(), embeds.clone().requires_grad_()
        (draft(features_, embeds_, anchors) * pull).sum().backward()
        gradients.append([features_.grad, embeds_.grad, *(p.grad for p in draft.parameters())])
    for split, dense in zip(*gradients, strict=True):
        torch.testing.assert_close(split, dense, rtol=1e-4, atol=1e-4)


def test_split_gradients_in_bfloat16_are_as_near_to_the_truth_as_the_dense_ones():
    features, embeds, anchors = inputs(2, 40, 6, 8)
    pull = torch.randn(embeds.shape, generator=torch.Generator().manual_seed(1))

    def gradient(attention, dtype):
        draft = random_draft(attention).requires_grad_().to(dtype)
        (draft(features.to(dtype), embeds.to(dtype), anchors) * pull.to(dtype)).sum().backward()
        return torch.cat([p.grad.double().flatten() for p in draft.parameters()])

    truth = gradient("dense", torch.float64)
    split, dense = ((gradient(name, torch.bfloat16) - truth).norm() / truth.norm() for name in ("split", "dense"))
    assert split < 1.2 * dense < 0.1


def test_auto_is_the_split_form_on_the_cpu():
    features, embeds, anchors = inputs(1, 9, 4, 5)
    assert random_draft("auto")(features, embeds, anchors).equal(random_draft("split")(features, embeds, anchors))


def test_bfloat16_stays_near_float32():
    features, embeds, anchors = inputs(2, 20, 3, 4)
    expected = random_draft()(features, embeds, anchors)
    with torch.autocast("cpu", torch.bfloat16):
        ours = random_draft()(features.bfloat16(), embeds.bfloat16(), anchors)
    assert ours.dtype == torch.bfloat16
    assert (ours.float() - expected).norm() / expected.norm() < 0.05


# ---- nothing leaks


@pytest.mark.parametrize("variant", ["dflash", "dflare", "gated"])
@pytest.mark.parametrize("attention", ["split", "dense", "flex"])
def test_nothing_at_or_after_an_anchor_and_no_other_block_is_seen(variant, attention):
    draft = random_draft(attention, variant=variant)
    features, embeds, anchors = inputs(2, 12, 5, 4)
    hidden = draft(features, embeds, anchors)
    noise = torch.Generator().manual_seed(9)
    for j in range(5):
        other_features, other_embeds, other_anchors = features.clone(), embeds.clone(), anchors.clone()
        for n in range(2):
            after = other_features[n, anchors[n, j] :]
            after.copy_(1e3 * torch.randn(after.shape, generator=noise))
        others = [i for i in range(5) if i != j]
        other_embeds[:, others] = 1e3 * torch.randn(2, 4, 4, WIDTH, generator=noise)
        other_anchors[:, others] = torch.randint(0, 13, (2, 4), generator=noise)
        again = draft(other_features, other_embeds, other_anchors)
        torch.testing.assert_close(again[:, j], hidden[:, j], rtol=0, atol=1e-6)
        assert not torch.allclose(again[:, others], hidden[:, others], atol=1e-2)


@pytest.mark.parametrize("attention", ["split", "dense"])
def test_no_gradient_reaches_what_a_block_must_not_see(attention):
    draft = random_draft(attention)
    features, embeds, anchors = inputs(1, 10, 3, 4)
    anchors[0] = torch.tensor([0, 4, 10])
    features.requires_grad_()
    embeds.requires_grad_()
    for j, anchor in enumerate([0, 4, 10]):
        to_features, to_embeds = torch.autograd.grad(draft(features, embeds, anchors)[0, j].sum(), (features, embeds))
        reached = to_features[0].abs().sum(-1)
        assert (reached[:anchor] > 0).all() and not reached[anchor:].any()
        reached = to_embeds[0].abs().sum((-1, -2))
        assert reached[j] > 0 and not reached[[i for i in range(3) if i != j]].any()


def test_a_block_is_bidirectional_inside():
    draft = random_draft()
    features, embeds, anchors = inputs(1, 6, 1, 4)
    embeds.requires_grad_()
    hidden = draft(features, embeds, anchors)
    for slot in range(4):
        (gradient,) = torch.autograd.grad(hidden[0, 0, slot].sum(), embeds, retain_graph=True)
        assert (gradient[0, 0].abs().sum(-1) > 0).all()


def test_the_last_context_token_is_seen():
    draft = random_draft()
    features, embeds, _ = inputs(1, 6, 1, 3)
    moved = features.clone()
    moved[:, 3] += 1
    hidden, again = (draft(f, embeds, torch.tensor([[4]])) for f in (features, moved))
    assert not torch.allclose(hidden, again, atol=1e-3)


# ---- the cached forward


@pytest.mark.parametrize(
    "variant, block_size", [*(("dflash", size) for size in range(2, 17)), ("dflare", 5), ("gated", 5), ("dspark", 5)]
)
def test_training_at_an_anchor_equals_cached_decoding_there(variant, block_size):
    draft = random_draft(block_size=block_size, variant=variant)
    context = 20
    features, embeds, anchors = inputs(2, context, 5, block_size, seed=block_size)
    anchors[0, :3] = torch.tensor([0, 1, context])
    head = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(2))
    hidden = draft(features, embeds, anchors) @ head.T
    for n in range(2):
        for j in range(5):
            cache = draft.start(context)
            draft.extend(cache, features[n : n + 1, : anchors[n, j]])
            decoded = draft.propose(cache, embeds[n : n + 1, j]) @ head.T
            torch.testing.assert_close(decoded[0], hidden[n, j], rtol=0, atol=1e-4)


def test_a_cache_filled_in_pieces_with_proposals_between_equals_one_filled_at_once():
    draft = random_draft(block_size=4)
    features, embeds, _ = inputs(1, 13, 5, 4)
    pieces, at_once = draft.start(13), draft.start(13)
    filled = 0
    for step, length in enumerate((0, 5, 1, 3, 4)):
        draft.extend(pieces, features[:, filled : filled + length])
        filled += length
        assert pieces.length == filled
        first = draft.propose(pieces, embeds[:, step])
        assert pieces.length == filled
        torch.testing.assert_close(draft.propose(pieces, embeds[:, step]), first, rtol=0, atol=0)
    draft.extend(at_once, features)
    torch.testing.assert_close(draft.propose(at_once, embeds[:, -1]), first, rtol=1e-5, atol=1e-5)


def test_rows_of_a_batch_are_decoded_independently():
    draft = random_draft(block_size=4)
    features, embeds, _ = inputs(3, 7, 1, 4)
    together = draft.start(7, batch=3)
    draft.extend(together, features)
    hidden = draft.propose(together, embeds[:, 0])
    for n in range(3):
        alone = draft.start(7)
        draft.extend(alone, features[n : n + 1])
        torch.testing.assert_close(draft.propose(alone, embeds[n : n + 1, 0])[0], hidden[n], rtol=1e-5, atol=1e-5)


def test_rows_of_unlike_length_are_decoded_as_each_alone():
    draft = random_draft(block_size=4)
    features, embeds, _ = inputs(3, 12, 1, 4)
    together, lengths = draft.start(12, batch=3), [7, 3, 5]
    draft.extend(together, features[:, :7])
    together.rewind(lengths)
    for growth in ([1, 3, 2], [3, 2, 1]):
        hidden = draft.propose(together, embeds[:, 0])
        for n in range(3):
            alone = draft.start(12)
            draft.extend(alone, features[n : n + 1, : lengths[n]])
            expected = draft.propose(alone, embeds[n : n + 1, 0])[0]
            torch.testing.assert_close(expected, hidden[n], rtol=1e-5, atol=1e-5)
        new = torch.stack([features[n, lengths[n] : lengths[n] + 3] for n in range(3)])
        draft.extend(together, new)  # what is too much in a row is forgotten again
        lengths = [length + more for length, more in zip(lengths, growth)]
        together.rewind(lengths)


def test_a_draft_may_propose_smaller_blocks_than_it_was_trained_with():
    draft = random_draft(block_size=8)
    features, embeds, _ = inputs(1, 7, 1, 3)
    cache = draft.start(7)
    draft.extend(cache, features)
    expected = oracle(draft, features[0], embeds[0, 0], 7)
    torch.testing.assert_close(draft.propose(cache, embeds[:, 0])[0].double(), expected, rtol=1e-4, atol=1e-4)


def test_more_context_than_the_cache_holds_is_an_error():
    draft = random_draft(block_size=2)
    features, *_ = inputs(1, 9, 1, 2)
    with pytest.raises((RuntimeError, ValueError)):
        draft.extend(draft.start(4), features)


def test_a_partial_rope_decodes_as_it_was_trained():
    target = llama(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 2 / 3})
    draft = random_draft(target=target)
    assert rotary(draft.rope, torch.tensor([3]))[0].shape == (1, 4)
    features, embeds, _ = inputs(1, 9, 1, 4)
    hidden = draft(features, embeds, torch.tensor([[6]]))
    cache = draft.start(9)
    draft.extend(cache, features[:, :6])
    torch.testing.assert_close(draft.propose(cache, embeds[:, 0]), hidden[:, 0], rtol=0, atol=1e-4)


def test_a_reset_draft_depends_on_its_seed_alone():
    first, again, other = (Draft(adapt(llama(), chosen(), 3)) for _ in range(3))
    for draft, seed in ((first, 1), (again, 1), (other, 2)):
        torch.rand(seed)  # the global stream stands elsewhere
        draft.reset(seed)
    assert all(a.equal(b) for a, b in zip(first.parameters(), again.parameters()))
    assert not first.fc.weight.equal(other.fc.weight)
    assert first.fc.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert first.norm.weight.equal(torch.ones(WIDTH))


def test_the_dense_references_mask_is_the_visibility_of_blocks():
    """Ties the backends, which are compared with the dense one, to the definition that blocks.py is tested for."""
    from draftlab.draft import DenseAttention

    anchors = torch.tensor([[0, 3, 5]])
    assert DenseAttention(anchors, 6, 2).mask[:, 0].equal(blocks.visible(anchors, 6, 2))
