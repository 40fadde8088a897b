"""Other projects' config.json: read as the same draft as the authors' own, written as theirs, or refused."""

import copy

import pytest

from draftlab import checkpoint, formats
from draftlab.errors import UserError

LAYERS = {
    "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 5,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960, "vocab_size": 151936, "attention_bias": False, "tie_word_embeddings": False,
    "sliding_window": None, "use_sliding_window": False, "layer_types": ["full_attention"] * 5,
}

AUTHORS = {
    **LAYERS, "architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 16, "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "num_target_layers": 36, "rope_theta": 1000000, "rope_scaling": None, "dtype": "bfloat16",
    "bos_token_id": 151643, "eos_token_id": 151645, "max_window_layers": 5, "initializer_range": 0.02,
}
"""z-lab/Qwen3-8B-DFlash-b16, the older nesting."""

NEWER = {key: value for key, value in AUTHORS.items() if key not in ("block_size", "rope_theta", "rope_scaling")} | {
    "dflash_config": {**AUTHORS["dflash_config"], "block_size": 16},
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
}
"""The nesting of z-lab's Qwen3.5 drafts (tests/fixtures/dflash2-config.json in z-lab/dflash)."""

ANGELSLIM = {
    **AUTHORS, "architectures": ["QwenDFlashDraftModel"], "torch_dtype": "bfloat16", "num_anchors": 512,
    "loss_decay_gamma": 7.0, "attention_backend": "flex_attention",
}
"""configs/qwen3_dflash.json of AngelSlim, for the 8B target."""

SPECULATORS = {
    "architectures": ["DFlashDraftModel"], "speculators_model_type": "dflash", "speculators_version": "0.5.0",
    "speculators_config": {
        "algorithm": "dflash", "default_proposal_method": "greedy",
        "proposal_methods": [
            {"proposal_type": "greedy", "speculative_tokens": 15, "verifier_accept_k": 1, "accept_tolerance": 0.0}
        ],
        "verifier": {"name_or_path": "Qwen/Qwen3-8B", "architectures": ["Qwen3ForCausalLM"]},
    },
    "transformer_layer_config": {
        **LAYERS, "architectures": ["Qwen3ForCausalLM"],
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    },
    "draft_vocab_size": 151936, "block_size": 16, "aux_hidden_state_layer_ids": [2, 10, 18, 26, 34],
    "mask_token_id": 151669, "target_hidden_size": None, "sliding_window_non_causal": False,
    "projector_type": "dflash", "sample_from_anchor": False, "shift_label": False, "auf": False,
    "tie_word_embeddings": True, "dtype": "bfloat16", "transformers_version": "5.15.0",
}
"""As DFlashSpeculatorConfig of speculators serialises it."""

DEEPSPEC = {
    **LAYERS, "architectures": ["Qwen3DSparkModel"], "block_size": 7, "mask_token_id": 151669,
    "target_layer_ids": [1, 9, 17, 25, 33], "num_target_layers": 36, "num_anchors": 512,
    "enable_confidence_head": False, "markov_rank": 0, "rope_theta": 1000000,
}
"""As build_draft_config of DeepSpec makes it for dflash_qwen3_8b_block7."""


def read(data, **known):
    data, _ = formats.to_authors(copy.deepcopy(data), "config.json")
    return checkpoint.spec_from_json(data, known=known)


EXPECTED = read(AUTHORS)


def test_the_authors_older_form_is_read_field_by_field():
    assert (EXPECTED.block_size, EXPECTED.mask_token_id, EXPECTED.target_layer_ids) == (16, 151669, (1, 9, 17, 25, 33))
    assert (EXPECTED.target_num_hidden_layers, EXPECTED.num_hidden_layers, EXPECTED.hidden_size) == (36, 5, 4096)
    assert EXPECTED.rope_parameters == {"rope_type": "default", "rope_theta": 1000000}
    assert EXPECTED.label_layout == "same" and EXPECTED.draft_vocab_size is None


@pytest.mark.parametrize("data", [NEWER, ANGELSLIM, SPECULATORS], ids=["newer", "angelslim", "speculators"])
def test_every_form_describes_the_same_draft(data):
    assert read(data, num_target_layers=36) == EXPECTED


def test_the_layer_ids_of_speculators_are_one_higher():
    data, _ = formats.to_authors(SPECULATORS, "config.json")
    assert data["target_layer_ids"] == [1, 9, 17, 25, 33]
    with pytest.raises(UserError, match="got -1"):  # their 0 is the embedding, which no layer puts out
        read({**SPECULATORS, "aux_hidden_state_layer_ids": [0, 10]}, num_target_layers=36)
    with pytest.raises(UserError, match="last layer"):
        read({**SPECULATORS, "aux_hidden_state_layer_ids": [2, 36]}, num_target_layers=36)


def test_only_forms_that_lend_the_targets_tensors_may_hold_them():
    lent = {
        name: formats.to_authors(data, "config.json")[1]
        for name, data in (("authors", AUTHORS), ("angelslim", ANGELSLIM), ("deepspec", DEEPSPEC))
    }
    assert lent == {"authors": (), "angelslim": (), "deepspec": formats.LENT}
    assert set(formats.to_authors(SPECULATORS, "config.json")[1]) == {*formats.LENT, "d2t", "t2d"}


def test_a_reduced_vocabulary_of_speculators_is_kept_with_its_tables():
    data, lent = formats.to_authors({**SPECULATORS, "draft_vocab_size": 32000}, "config.json")
    assert checkpoint.spec_from_json(data, known={"num_target_layers": 36}).draft_vocab_size == 32000
    assert lent == formats.LENT


def test_deepspecs_draft_differs_in_nothing_but_its_labels():
    data, _ = formats.to_authors(DEEPSPEC, "config.json")
    assert data["label_layout"] == "next"
    ours = checkpoint.spec_from_json({**data, "label_layout": "same"})
    assert (ours.block_size, ours.mask_token_id, ours.target_layer_ids) == (7, 151669, (1, 9, 17, 25, 33))


@pytest.mark.parametrize("key", ["sample_from_anchor", "shift_label"])
def test_speculators_with_labels_shifted_by_one_are_told_apart(key):
    assert formats.to_authors({**SPECULATORS, key: True}, "config.json")[0]["label_layout"] == "next"


STRANGERS = {
    "another speculator": ({**SPECULATORS, "speculators_model_type": "eagle3"}, "eagle3"),
    "no layers": ({**SPECULATORS, "transformer_layer_config": None}, "transformer_layer_config"),
    "domino": ({**SPECULATORS, "projector_type": "domino"}, "projector_type must be dflash"),
    "windows inside": (
        {**SPECULATORS, "transformer_layer_config": {**LAYERS, "layer_types": ["sliding_attention"] * 5}}, "layer_types"
    ),
    "windows outside": ({**SPECULATORS, "layer_types": ["sliding_attention"] * 5}, "layer_types"),
    "several streams": ({**SPECULATORS, "target_hidden_size": 16384}, "target_hidden_size 16384"),
    "layers that are no list": ({**SPECULATORS, "aux_hidden_state_layer_ids": "2"}, "target_layer_ids must be a list"),
    "markov head": ({**DEEPSPEC, "markov_rank": 256}, "markov_rank must be 0"),
    "confidence head": ({**DEEPSPEC, "enable_confidence_head": True}, "enable_confidence_head must be 0"),
    "dflash2": ({**AUTHORS, "architectures": ["DFlash2DraftModel"]}, "architectures"),
    "causal": ({**AUTHORS, "is_causal": True}, "is_causal must be False"),
    "windows": ({**AUTHORS, "dflash_config": {**AUTHORS["dflash_config"], "use_swa": True}}, "use_swa must be False"),
    "windows by default": (
        {**{k: v for k, v in AUTHORS.items() if k != "layer_types"}, "use_sliding_window": True}, "layer_types"
    ),
    "biases": ({**AUTHORS, "attention_bias": True}, "attention_bias must be False"),
    "duplicates": ({**AUTHORS, "dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 1]}}, "more than once"),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_what_is_no_plain_dflash_is_refused_in_one_line(name):
    data, said = STRANGERS[name]
    with pytest.raises(UserError, match=said) as caught:
        read(data, num_target_layers=36)
    assert "config.json" in str(caught.value) and "\n" not in str(caught.value)


def test_speculators_form_is_written_as_they_write_it():
    ours = checkpoint.spec_to_json(EXPECTED, "float32")
    written = formats.to_speculators(ours, "Qwen/Qwen3-8B", ["Qwen3ForCausalLM"])
    keys = "speculators_model_type block_size mask_token_id aux_hidden_state_layer_ids draft_vocab_size".split()
    assert {key: written[key] for key in keys} == {key: SPECULATORS[key] for key in keys}
    theirs = copy.deepcopy(SPECULATORS["speculators_config"])
    theirs["proposal_methods"] = [{"proposal_type": "greedy", "speculative_tokens": 15}]  # the others are defaults
    assert written["speculators_config"] == theirs and written["sample_from_anchor"] is False
    layers = written["transformer_layer_config"]
    assert {key: layers[key] for key in LAYERS} == LAYERS
    assert layers["rope_parameters"] == SPECULATORS["transformer_layer_config"]["rope_parameters"]
    assert not {"block_size", "dflash_config", "num_target_layers", "auto_map"} & layers.keys()


def test_a_spec_survives_speculators_form_without_any_help():
    ours = checkpoint.spec_to_json(EXPECTED, "float32")
    assert read(formats.to_speculators(ours, "Qwen/Qwen3-8B", [])) == EXPECTED
