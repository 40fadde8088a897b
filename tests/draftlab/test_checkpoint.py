"""The checkpoint's form, field by field, its way back, and everything that must not be loaded."""

import dataclasses
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, LlamaConfig, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from draftlab import checkpoint, config
from draftlab.config import DraftConfig, TargetConfig
from draftlab.draft import Draft, adapt, rotary
from draftlab.errors import UserError
from draftlab.target import load_target

TARGET = {"name": "little", "revision": "r1", "fingerprint": "0123456789ab"}
RUN = config.load(config.CONFIGS / "tiny.yaml").replace({"loss.gamma": float("inf"), "train.lr": 1e-5})

SHAPE = dict(
    vocab_size=50, hidden_size=24, intermediate_size=40, num_hidden_layers=5, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=512, tie_word_embeddings=True,
)

KEYS = """architectures model_type block_size dflash_config num_target_layers num_hidden_layers layer_types hidden_size
intermediate_size num_attention_heads num_key_value_heads head_dim hidden_act rms_norm_eps rope_theta rope_scaling
rope_parameters max_position_embeddings vocab_size attention_bias tie_word_embeddings dtype""".split()
"""The contract's list; the published files also say these, of which readers take no harm:"""
ALSO = {"attention_dropout", "sliding_window", "use_sliding_window", "use_cache", "target_hidden_size"}

SEED = {
    "hidden_size": 4096, "num_hidden_layers": 5, "num_target_layers": 5, "target_hidden_size": 4096,
    "target_num_hidden_layers": 36, "target_layer_ids": [1, 9, 17, 25, 33], "mask_token_id": 151669,
    "vocab_size": 151936,
}
"""The flat keys that tell a DFlash config; the rest of a config is that of any Qwen3 model."""

REST = {
    "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "rms_norm_eps": 1e-6, "rope_theta": 1000000, "max_position_embeddings": 40960,
}

PUBLISHED = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": 16,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "num_target_layers": 36, "num_hidden_layers": 5, "layer_types": ["full_attention"] * 5, "hidden_size": 4096,
    "hidden_act": "silu", "rope_scaling": None, "vocab_size": 151936, "attention_bias": False,
    "attention_dropout": 0.0, "sliding_window": None, "use_sliding_window": False, "tie_word_embeddings": False,
    "use_cache": True, **REST,
}
"""What SGLang and vLLM load as the draft of Qwen3-8B, without the keys that only training or generation reads."""


def little_spec(rope=None, **changes):
    target = LlamaConfig(**SHAPE, rope_parameters=rope or {"rope_type": "default", "rope_theta": 5e5})
    return adapt(target, DraftConfig(**{"num_hidden_layers": 2, "target_layer_ids": [0, 2], **changes}), 3)


def little_draft(**changes):
    draft = Draft(little_spec(**changes))
    draft.reset(0)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    return draft


@pytest.fixture
def saved(tmp_path):
    folder = tmp_path / "draft"
    checkpoint.save(folder, little_draft(), RUN, TARGET)
    return folder


def edit(folder, **changes):
    path = folder / "config.json"
    data = json.loads(path.read_text())
    for key, value in changes.items():
        data[key] = value
    path.write_text(json.dumps(data))


def reweigh(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def refusal(folder):
    with pytest.raises(UserError) as caught:
        checkpoint.load(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- what is written


def test_config_json_has_exactly_the_keys_of_the_contract(saved):
    data = json.loads((saved / "config.json").read_text())
    assert set(data) == set(KEYS) | ALSO
    assert data["architectures"] == ["DFlashDraftModel"] and data["model_type"] == "qwen3"
    assert data["block_size"] == data["dflash_config"]["block_size"] == 16
    nested = {"block_size": 16, "mask_token_id": 3, "target_layer_ids": [0, 2], "label_layout": "same"}
    assert data["dflash_config"] == nested
    assert data["num_target_layers"] == 5  # the target's depth, not the number of taps
    assert data["num_hidden_layers"] == 2 and data["layer_types"] == ["full_attention"] * 2
    sizes = [data[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")]
    assert (*sizes, data["head_dim"], data["vocab_size"]) == (24, 40, 4, 2, 8, 50)
    assert data["rope_theta"] == 5e5 and data["rope_scaling"] is None
    assert data["rope_parameters"] == {"rope_type": "default", "rope_theta": 5e5}
    assert data["max_position_embeddings"] == 512 and data["rms_norm_eps"] == 1e-6
    assert data["hidden_act"] == "silu" and data["attention_bias"] is False and data["tie_word_embeddings"] is True
    assert data["dtype"] == "float32"


@pytest.mark.parametrize("markov_head, confidence", [(None, False), ("vanilla", True), ("gated", False), ("rnn", True)])
def test_a_dspark_draft_is_written_in_its_authors_form_and_comes_back(tmp_path, markov_head, confidence):
    heads = {"markov_head": markov_head, "markov_rank": 4, "confidence": confidence}
    draft = little_draft(variant="dspark", **heads)
    checkpoint.save(tmp_path, draft, RUN, TARGET)
    data = json.loads((tmp_path / "config.json").read_text())
    assert data["architectures"] == ["Qwen3DSparkModel"] and data["dflash_config"]["label_layout"] == "next"
    assert (data["mask_token_id"], data["target_layer_ids"]) == (3, [0, 2])
    assert data["markov_rank"] == (4 if markov_head else 0) and data["enable_confidence_head"] == confidence
    loaded, _ = checkpoint.load(tmp_path)
    assert loaded.spec == draft.spec and loaded.spec.markov_head == markov_head
    assert all(weight.equal(loaded.state_dict()[name]) for name, weight in draft.state_dict().items())
    names = {name for name in draft.state_dict() if "head" in name}
    expected = {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"} if markov_head else set()
    own = {"gated": "markov_head.gate_proj", "rnn": "markov_head.joint_proj"}.get(markov_head)
    for module in [own] * bool(own) + ["confidence_head.proj"] * confidence:
        expected |= {f"{module}.weight", f"{module}.bias"}
    assert names == expected


def test_a_calibrated_draft_is_a_copy_with_its_temperatures(tmp_path):
    draft = little_draft(variant="dspark", confidence=True)
    checkpoint.save(tmp_path / "plain", draft, RUN, TARGET)
    checkpoint.save_calibrated(tmp_path / "new" / "one", tmp_path / "plain", [0.5, 2.0], {"temperature": 0.7})
    (plain, before), (loaded, after) = (checkpoint.load(tmp_path / name) for name in ("plain", "new/one"))
    assert plain.spec.confidence_temperatures is None and loaded.spec.confidence_temperatures == (0.5, 2.0)
    assert loaded.spec == dataclasses.replace(plain.spec, confidence_temperatures=(0.5, 2.0))
    assert all(weight.equal(loaded.state_dict()[name]) for name, weight in plain.state_dict().items())
    assert after.run == before.run and after.hash != before.hash
    assert after.provenance == {**before.provenance, "calibration": {"temperature": 0.7}}
    data, other = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("plain", "new/one"))
    assert {**data, "confidence_temperatures": [0.5, 2.0]} == other
    checkpoint.save(tmp_path / "again", loaded, RUN, TARGET)
    assert json.loads((tmp_path / "again" / "config.json").read_text()) == other


def test_a_calibrated_draft_in_several_files_is_copied_whole(tmp_path):
    checkpoint.save(tmp_path / "plain", little_draft(variant="dspark", confidence=True), RUN, TARGET)
    cut(tmp_path / "plain")
    checkpoint.save_calibrated(tmp_path / "new", tmp_path / "plain", [2.0], {})
    assert checkpoint.load(tmp_path / "new")[0].spec.confidence_temperatures == (2.0,)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"confidence_temperatures": [1.0], "enable_confidence_head": False}, "belong to an enable_confidence_head"),
        ({"confidence_temperatures": []}, "confidence_temperatures must be a list"),
        ({"confidence_temperatures": 2.0}, "confidence_temperatures must be a list"),
        ({"confidence_temperatures": [1.0, 0]}, "confidence_temperatures must be a positive number, got 0"),
        ({"confidence_temperatures": [1.0, "x"]}, "confidence_temperatures must be a positive number"),
    ],
)
def test_temperatures_that_cannot_be_are_refused(change, said):
    with pytest.raises(UserError, match=said):
        checkpoint.spec_from_json(
            {**PUBLISHED, "architectures": ["Qwen3DSparkModel"], "enable_confidence_head": True, **change}
        )


@pytest.mark.parametrize(
    "change, said",
    [
        ({"label_layout": "same"}, "label_layout of a Qwen3DSparkModel must be next"),
        ({"markov_rank": 4, "markov_head_type": "lstm"}, "markov_head_type"),
        ({"enable_confidence_head": True, "confidence_head_with_markov": True}, "confidence_head_with_markov"),
    ],
)
def test_a_dspark_config_that_contradicts_itself_is_refused(change, said):
    with pytest.raises(UserError, match=said):
        checkpoint.spec_from_json({**PUBLISHED, "architectures": ["Qwen3DSparkModel"], **change})


@pytest.mark.parametrize(
    "variant, architecture", [("dflare", "QwenDFlareDraftModel"), ("gated", "DFlashGatedDraftModel")]
)
def test_a_variant_comes_back_as_itself(tmp_path, variant, architecture):
    draft = little_draft(variant=variant)
    checkpoint.save(tmp_path, draft, RUN, TARGET)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [architecture]
    loaded, _ = checkpoint.load(tmp_path)
    assert loaded.spec == draft.spec and loaded.spec.variant == variant
    assert all(weight.equal(loaded.state_dict()[name]) for name, weight in draft.state_dict().items())


def test_a_variant_is_not_written_in_a_form_that_lacks_it(tmp_path):
    checkpoint.export(tmp_path / "zlab", little_draft(variant="dflare"), "zlab", "little", [])
    assert checkpoint.load(tmp_path / "zlab")[0].spec.variant == "dflare"
    with pytest.raises(UserError, match="speculators: expected .* dflash, got dflare"):
        checkpoint.export(tmp_path / "other", little_draft(variant="dflare"), "speculators", "little", [])


def test_a_variants_weights_are_not_taken_for_anothers(saved):
    edit(saved, architectures=["QwenDFlareDraftModel"])
    with pytest.raises(UserError, match="lacks .*k_proj_target"):
        checkpoint.load(saved)


def test_tensors_have_exactly_the_published_names_and_no_embedding_or_head(saved):
    layer = [f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    layer += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"]
    names = {f"layers.{i}.{name}.weight" for i in range(2) for name in layer}
    with safe_open(saved / "model.safetensors", "pt") as file:
        assert set(file.keys()) == names | {"fc.weight", "hidden_norm.weight", "norm.weight"}
        assert file.metadata() == {"format": "pt"}
        assert file.get_slice("fc.weight").get_shape() == [24, 2 * 24]
        assert all(file.get_tensor(name).dtype == torch.float32 for name in file.keys())
    assert not any("embed" in name or "lm_head" in name for name in load_file(saved / "model.safetensors"))


def test_the_paper_sized_config_is_the_published_one():
    target = Qwen3Config(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000}, tie_word_embeddings=False,
    )
    run = config.load(config.CONFIGS / "qwen3_8b.yaml")
    ours = checkpoint.spec_to_json(adapt(target, run.draft, mask_token_id=0), "bfloat16")
    nested = ours.pop("dflash_config")
    assert {key: ours[key] for key in PUBLISHED if key != "dflash_config"} == {
        key: value for key, value in PUBLISHED.items() if key != "dflash_config"
    }
    assert nested == {**PUBLISHED["dflash_config"], "block_size": 16, "label_layout": "same"}
    assert "auto_map" not in ours


def test_no_code_travels_with_a_checkpoint(saved):
    files = {path.name for path in saved.iterdir()}
    assert files == {"config.json", "model.safetensors", "run.yaml", "provenance.json"}
    assert "auto_map" not in (saved / "config.json").read_text()


def test_transformers_reads_the_config_as_a_qwen3_with_the_same_rope(tmp_path):
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
    checkpoint.save(tmp_path, little_draft(rope=rope), RUN, TARGET)
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(theirs, Qwen3Config) and theirs.num_hidden_layers == 2 and theirs.head_dim == 8
    positions = torch.arange(500)[None]
    cos, sin = Qwen3RotaryEmbedding(theirs)(torch.zeros(1), positions)
    draft, _ = checkpoint.load(tmp_path)
    torch.testing.assert_close(rotary(draft.rope, positions), (cos, sin), rtol=1e-5, atol=2e-5)


def test_the_resolved_run_and_the_provenance_stand_beside_the_weights(saved):
    _, info = checkpoint.load(saved)
    assert info.run == RUN and info.folder == saved
    assert info.provenance["target"] == TARGET
    assert info.provenance["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert {"python", "draftlab", "transformers", "ray", "mlflow"} <= set(info.provenance["versions"])
    assert info.provenance["command"] and "git" in info.provenance


# ---- the way back


def test_a_reloaded_draft_gives_the_same_logits(saved):
    before, (after, _) = little_draft(), checkpoint.load(saved)
    assert after.spec == before.spec
    generator = torch.Generator().manual_seed(0)
    features, embeds = torch.randn(2, 9, 48, generator=generator), torch.randn(2, 3, 4, 24, generator=generator)
    anchors = torch.tensor([[0, 1, 5], [9, 4, 2]])
    assert after(features, embeds, anchors).equal(before(features, embeds, anchors))
    assert not after.training and not any(weight.requires_grad for weight in after.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_draft_is_loaded_in_the_wanted_precision(saved, dtype):
    draft, _ = checkpoint.load(saved, dtype=dtype, device="cpu")
    assert {weight.dtype for weight in draft.parameters()} == {dtype}


def test_saving_again_keeps_the_hash_and_other_weights_change_it(saved, tmp_path):
    draft, info = checkpoint.load(saved)
    checkpoint.save(tmp_path / "again", draft, RUN, TARGET)
    assert checkpoint.load(tmp_path / "again")[1].hash == info.hash
    with torch.no_grad():
        draft.norm.weight[0] += 1e-3
    checkpoint.save(tmp_path / "other", draft, RUN, TARGET)
    assert checkpoint.load(tmp_path / "other")[1].hash != info.hash
    assert len(info.hash) == 12 and int(info.hash, 16) >= 0


ROPES = [
    {"rope_type": "default", "rope_theta": 1e4},
    {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
    {"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 1e4},
    {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128, "rope_theta": 1e4,
    },
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: "-".join(map(str, rope.values()))[:20])
def test_a_spec_survives_its_own_json_and_older_rope_keys(rope):
    spec = little_spec(rope=rope)
    data = json.loads(json.dumps(checkpoint.spec_to_json(spec, "float32")))
    assert checkpoint.spec_from_json(data) == spec
    del data["rope_parameters"]
    assert checkpoint.spec_from_json(data).rope_parameters == rope
    if rope["rope_type"] != "default":  # the oldest form
        data["rope_scaling"]["type"] = data["rope_scaling"].pop("rope_type")
        assert checkpoint.spec_from_json(data).rope_parameters == rope


def test_a_partial_rope_may_stand_at_the_top():
    data = {**PUBLISHED, "partial_rotary_factor": 0.25}
    assert checkpoint.spec_from_json(data).rope_parameters == {
        "rope_type": "default", "partial_rotary_factor": 0.25, "rope_theta": 1000000,
    }


def test_a_published_config_is_read():
    spec = checkpoint.spec_from_json(PUBLISHED)
    assert (spec.block_size, spec.mask_token_id, spec.target_layer_ids) == (16, 151669, (1, 9, 17, 25, 33))
    assert (spec.target_num_hidden_layers, spec.target_hidden_size, spec.label_layout) == (36, 4096, "same")
    assert spec.rope_parameters == {"rope_type": "default", "rope_theta": 1000000}


def test_the_seeds_flat_keys_give_the_same_draft():
    assert checkpoint.spec_from_json({**SEED, **REST}) == checkpoint.spec_from_json(PUBLISHED)


@pytest.mark.parametrize("where", ["top", "nested", "both"])
def test_block_size_is_read_wherever_it_stands(where):
    data = {key: value for key, value in PUBLISHED.items() if key != "block_size"}
    if where != "nested":
        data["block_size"] = 8
    if where != "top":
        data["dflash_config"] = {**data["dflash_config"], "block_size": 8}
    assert checkpoint.spec_from_json(data).block_size == 8


CONTRADICTIONS = {
    "block_size": {**PUBLISHED, "dflash_config": {**PUBLISHED["dflash_config"], "block_size": 8}},
    "mask_token_id": {**PUBLISHED, "mask_token_id": 5},
    "target_layer_ids": {**PUBLISHED, "target_layer_ids": [1, 9, 17, 25, 32]},
    "num_target_layers": {**SEED, **REST, "num_target_layers": 36},
    "target_hidden_size": {**SEED, **REST, "target_hidden_size": 2048},
    "rope_theta": {**PUBLISHED, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
}


@pytest.mark.parametrize("key", CONTRADICTIONS)
def test_a_contradiction_is_refused(key):
    with pytest.raises(UserError, match=key):
        checkpoint.spec_from_json(CONTRADICTIONS[key])


@pytest.mark.parametrize("layout", ["next", "same ", "", None, 1])
def test_an_unknown_label_layout_is_refused(layout):
    with pytest.raises(UserError, match="label_layout"):
        checkpoint.spec_from_json({**PUBLISHED, "label_layout": layout})


FOREIGN = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_act": "gelu_pytorch_tanh",
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
}


@pytest.mark.parametrize("key", FOREIGN)
def test_what_this_draft_does_not_have_is_refused_rather_than_dropped(key):
    with pytest.raises(UserError, match=key):
        checkpoint.spec_from_json({**PUBLISHED, key: FOREIGN[key]})


NEEDED = """dflash_config num_target_layers num_hidden_layers hidden_size intermediate_size num_attention_heads
rms_norm_eps rope_theta max_position_embeddings vocab_size""".split()


@pytest.mark.parametrize("key", NEEDED)
def test_a_missing_key_is_named_and_never_guessed(key):
    data = {name: value for name, value in PUBLISHED.items() if name != key}
    with pytest.raises(UserError, match="target_layer_ids" if key == "dflash_config" else key):
        checkpoint.spec_from_json(data)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"block_size": 1}, "block_size"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": "16"}, "block_size"),
        ({"hidden_size": -4096}, "hidden_size"),
        ({"num_hidden_layers": 5.0}, "num_hidden_layers"),
        ({"vocab_size": True}, "vocab_size"),
        ({"dflash_config": {"mask_token_id": 151936, "target_layer_ids": [1]}}, "mask_token_id"),
        ({"dflash_config": {"mask_token_id": -1, "target_layer_ids": [1]}}, "mask_token_id"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 1]}}, "more than once"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [36]}}, "36"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [35]}}, "last layer"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": 5}}, "target_layer_ids"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": ["1"]}}, "target_layer_ids"),
        ({"dflash_config": [1, 2]}, "dflash_config"),
    ],
)
def test_an_impossible_value_is_refused(changes, said):
    with pytest.raises(UserError, match=said):
        checkpoint.spec_from_json({**PUBLISHED, **changes})


WRONG_TYPES = [
    ("rope_parameters", [1, 2]),
    ("rope_parameters", "default"),
    ("rope_parameters", {"rope_type": "unheard of", "rope_theta": 1e4}),
    ("rope_parameters", {"rope_type": ["yarn"], "rope_theta": 1e4}),
    ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4}),
    ("rope_parameters", {"rope_type": "default", "rope_theta": {}}),
    ("rope_scaling", 2.0),
    ("rope_scaling", {"type": "linear", "factor": "two"}),
    ("rope_theta", "1e6"),
    ("rope_theta", [1000000]),
    ("rope_theta", -1.0),
    ("rope_theta", True),
    ("rope_theta", float("inf")),
    ("rms_norm_eps", "1e-6"),
    ("rms_norm_eps", 0),
    ("rms_norm_eps", [1e-6]),
    ("rms_norm_eps", float("nan")),
    ("layer_types", "full_attention"),
    ("layer_types", 5),
    ("layer_types", [1, 2]),
    ("layer_types", [["full_attention"], None]),
    ("architectures", "DFlashDraftModel"),
    ("architectures", {}),
    ("hidden_act", ["silu"]),
    ("draft_vocab_size", "40"),
    ("label_layout", ["same"]),
]


@pytest.mark.parametrize("key, value", WRONG_TYPES, ids=str)
def test_a_value_of_another_type_is_one_line_that_names_its_key(saved, key, value):
    data = json.loads((saved / "config.json").read_text())
    for name in ("rope_parameters", "rope_theta") if key.startswith("rope") else ():
        del data[name]
    data |= {"rope_theta": 1e4, key: value} if key != "rope_parameters" else {key: value}
    if key == "label_layout":
        del data["dflash_config"][key]
    (saved / "config.json").write_text(json.dumps(data))
    message = refusal(saved)
    assert "config.json" in message and ("rope" if key.startswith("rope") else key) in message


# ---- damage


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(saved, name):
    (saved / name).unlink()
    assert name in refusal(saved)


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    refusal(tmp_path / "nowhere")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.9, 0.9999])
def test_weights_cut_short_are_refused(saved, share):
    path = saved / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    assert "model.safetensors" in refusal(saved)


def test_a_scribbled_header_is_refused(saved):
    path = saved / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[20:40] = b"\xff" * 20
    path.write_bytes(bytes(data))
    assert "model.safetensors" in refusal(saved)


@pytest.mark.parametrize("text", ["", "{", '{"block_size": 16,', "[]", '"text"', "null", "\xff"])
def test_a_damaged_config_is_refused(saved, text):
    (saved / "config.json").write_bytes(text.encode("latin-1"))
    assert "config.json" in refusal(saved)


@pytest.mark.parametrize("name", ["run.yaml", "provenance.json"])
def test_a_damaged_note_beside_the_weights_is_refused(saved, name):
    (saved / name).write_text("{ a: [")
    assert name in refusal(saved)


@pytest.mark.parametrize("name", ["run.yaml", "provenance.json"])
def test_a_draft_from_elsewhere_has_no_notes(saved, name):
    (saved / name).unlink()
    _, info = checkpoint.load(saved)
    assert (info.run is None) == (name == "run.yaml") and (info.provenance == {}) == (name == "provenance.json")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused(saved, value):
    def spoil(tensors):
        tensors["layers.1.mlp.up_proj.weight"][3, 4] = value

    reweigh(saved, spoil)
    assert "layers.1.mlp.up_proj.weight" in refusal(saved)


def test_a_lacking_tensor_is_named(saved):
    reweigh(saved, lambda tensors: tensors.pop("layers.0.self_attn.k_norm.weight"))
    assert "layers.0.self_attn.k_norm.weight" in refusal(saved)


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight", "layers.0.self_attn.q_proj.bias"])
def test_a_tensor_too_many_is_named(saved, name):
    reweigh(saved, lambda tensors: tensors.update({name: torch.zeros(50, 24)}))
    assert name in refusal(saved)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(saved):
    reweigh(saved, lambda tensors: tensors.update({"fc.weight": torch.zeros(24, 24)}))
    message = refusal(saved)
    assert "fc.weight" in message and "(24, 48)" in message and "(24, 24)" in message


@pytest.mark.parametrize(
    "changes",
    [{"num_hidden_layers": 3}, {"hidden_size": 10**6, "target_hidden_size": 10**6}, {"head_dim": 4}],
    ids=lambda changes: next(iter(changes)),
)
def test_a_config_that_its_weights_contradict_is_refused_before_memory_is_taken(saved, changes):
    edit(saved, **changes)
    assert "model.safetensors" in refusal(saved) or "by config.json" in refusal(saved)


def test_nothing_in_the_folder_is_executed(saved, tmp_path):
    (saved / "modeling.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    edit(saved, auto_map={"AutoModel": "modeling.DFlashDraftModel"})
    checkpoint.load(saved)
    assert not (tmp_path / "ran").exists()


# ---- weights in several files


def cut(folder):
    """The weights in two files and an index, as save_pretrained of transformers writes large ones."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, part in files.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return sorted(files)


def test_weights_in_several_files_are_the_same_draft(saved):
    before, info = checkpoint.load(saved)
    _, second = cut(saved)
    after, other = checkpoint.load(saved)
    assert after.spec == before.spec and other.hash != info.hash
    assert all(after.state_dict()[name].equal(tensor) for name, tensor in before.state_dict().items())
    (saved / second).write_bytes((saved / second).read_bytes()[:-8])
    assert f"{second} is damaged" in refusal(saved)
    (saved / second).unlink()
    assert f"found no {second}" in refusal(saved)


@pytest.mark.parametrize("names", [None, [], {}, {"a": "../b"}, {"a": "/b"}, {"a": 1}], ids=str)
def test_an_index_that_names_no_files_beside_it_is_refused(saved, names):
    cut(saved)
    (saved / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert "model.safetensors.index.json should map tensors to files beside it" in refusal(saved)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits_are_read(saved, dtype):
    reweigh(saved, lambda tensors: tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()}))
    assert {weight.dtype for weight in checkpoint.load(saved)[0].parameters()} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_quantized_weights_are_refused(saved, dtype):
    name = "layers.0.mlp.up_proj.weight"
    reweigh(saved, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    assert f"{name} is quantized" in refusal(saved)


# ---- another target


def test_a_draft_for_another_target_is_refused():
    target = load_target(TargetConfig(model="tiny", dtype="float32", device="cpu"))
    spec = adapt(target.config, DraftConfig(target_layer_ids=[1]), target.mask_token_id)
    checkpoint.check_target(spec, target)
    for change in ({"vocab_size": 301}, {"target_hidden_size": 32}, {"target_num_hidden_layers": 5}):
        with pytest.raises(UserError) as caught:
            checkpoint.check_target(dataclasses.replace(spec, **change), target)
        assert "tiny" in str(caught.value) and str(*change.values()) in str(caught.value)


# ---- a reduced draft vocabulary


@pytest.fixture
def reduced(tmp_path):
    draft = little_draft(vocab=5)
    draft.set_vocabulary(torch.tensor([40, 3, 17, 4, 49]))
    checkpoint.save(tmp_path / "reduced", draft, RUN, TARGET)
    return tmp_path / "reduced"


def test_a_reduced_vocabulary_is_stored_as_eagle_3_does_and_comes_back(reduced):
    assert json.loads((reduced / "config.json").read_text())["draft_vocab_size"] == 5
    tensors = load_file(reduced / "model.safetensors")
    assert tensors["d2t"].tolist() == [3 - 0, 4 - 1, 17 - 2, 40 - 3, 49 - 4]
    assert tensors["t2d"].nonzero()[:, 0].tolist() == [3, 4, 17, 40, 49]
    draft, _ = checkpoint.load(reduced, dtype=torch.bfloat16)
    assert draft.token_ids.tolist() == [3, 4, 17, 40, 49]


def test_a_config_with_more_draft_tokens_than_tokens_is_refused(reduced):
    edit(reduced, draft_vocab_size=51)
    assert "draft_vocab_size must be at most vocab_size 50, got 51" in refusal(reduced)


@pytest.mark.parametrize("spoil", [
    lambda tensors: tensors["t2d"].fill_(True),
    lambda tensors: tensors["d2t"].fill_(0),
    lambda tensors: tensors["d2t"][4:].fill_(46),
    lambda tensors: tensors["d2t"].neg_(),
], ids=["membership", "other tokens", "beyond the vocabulary", "below it"])
def test_tables_that_do_not_agree_are_refused(reduced, spoil):
    reweigh(reduced, spoil)
    assert "d2t and t2d must name the same 5 ascending token ids below 50" in refusal(reduced)
