"""The target: its layers against transformers' own tuple, its ends against its own logits, on several architectures."""

import contextlib
import json
import os
import resource
import shutil
import threading

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3NextConfig,
    Starcoder2Config,
)

from draftlab import target as targets
from draftlab.cache import KVCache
from draftlab.config import TargetConfig
from draftlab.errors import UserError
from draftlab.target import (
    Head,
    check_layer_ids,
    choose_mask_token,
    layer_output_index,
    load_target,
    load_target_config,
)

SHAPE = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 258,
    "pad_token_id": 256,
    "bos_token_id": 257,
}
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4, "final_logit_softcapping": 5.0}
ARCHITECTURES = {
    "llama": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE, head_dim=16),
    "gemma2": Gemma2Config(**SHAPE, **GEMMA, attn_logit_softcapping=20.0),
    "gemma3": Gemma3TextConfig(**SHAPE, **GEMMA),
    "mistral": MistralConfig(**SHAPE, sliding_window=4),
    "gpt_oss": GptOssConfig(**SHAPE, head_dim=8, sliding_window=4, num_local_experts=4, num_experts_per_tok=2),
}


@pytest.fixture(scope="module")
def tiny():
    return load_target(TargetConfig(model="tiny", dtype="float32"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny):
    """Saves a random model of an architecture, with the tiny target's tokenizer, and gives its folder."""

    def save(config):
        place = tmp_path_factory.mktemp(config.model_type)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        for name, weight in model.named_parameters():
            nn.init.normal_(weight, std=0.2)  # the usual 0.02 would leave every layer an identity
        model.save_pretrained(place)
        tiny.tokenizer.save_pretrained(place)
        return place

    return save


@pytest.fixture(scope="module", params=ARCHITECTURES)
def target(request, folder):
    return load_target(TargetConfig(model=str(folder(ARCHITECTURES[request.param])), dtype="float32"))


def ids_of(target, count=2, length=12):
    return torch.randint(0, 250, (count, length), generator=torch.Generator().manual_seed(1))


def test_tapped_layers_equal_transformers_hidden_states_in_the_order_asked_for(target):
    ids = ids_of(target)
    states = target.model(ids, output_hidden_states=True).hidden_states
    features, last = target.tapped(ids, torch.tensor([12, 12]), (3, 0, 2))
    assert last is None
    torch.testing.assert_close(features, torch.cat([states[layer_output_index(i)] for i in (3, 0, 2)], -1))


def test_the_head_on_the_last_hidden_state_equals_the_models_logits(target):
    ids = ids_of(target)
    _, last = target.tapped(ids, torch.tensor([12, 12]), (1,), last_hidden=True)
    logits = target.ends.head.logits(last.flatten(0, 1))
    torch.testing.assert_close(logits, target.model(ids).logits.flatten(0, 1))


def test_the_borrowed_embedding_feeds_the_first_layer_as_the_target_does(target):
    ids = ids_of(target)
    embedded = target.ends.embedding(ids)
    torch.testing.assert_close(embedded, target.model(ids, output_hidden_states=True).hidden_states[0])


def test_padding_on_the_right_changes_nothing_and_reads_as_zero(target):
    ids = ids_of(target)
    features, last = target.tapped(ids, torch.tensor([12, 7]), (0, 3), last_hidden=True)
    alone, alone_last = target.tapped(ids[1:, :7], torch.tensor([7]), (0, 3), last_hidden=True)
    torch.testing.assert_close(features[1:, :7], alone)
    torch.testing.assert_close(last[1:, :7], alone_last)
    assert not features[1, 7:].any() and not last[1, 7:].any()
    assert features[0].any(-1).all()


@pytest.mark.parametrize("last_hidden, ran", [(False, [0, 1, 2]), (True, [0, 1, 2, 3, 4])])
def test_the_target_stops_after_the_deepest_layer_that_is_needed(target, last_hidden, ran):
    seen = []
    layers = target.model.get_decoder().layers
    hooks = [layer.register_forward_pre_hook(lambda *_, i=i: seen.append(i)) for i, layer in enumerate(layers)]
    readers = [len(layer._forward_hooks) for layer in layers]
    target.tapped(ids_of(target), torch.tensor([12, 12]), (2, 0), last_hidden=last_hidden)
    for hook in hooks:
        hook.remove()
    assert seen == ran
    assert [len(layer._forward_hooks) for layer in layers] == readers  # none is left behind


@pytest.mark.parametrize("cuts", [(12,), (1,) * 12, (5, 1, 3, 3)])
def test_forward_with_a_cache_equals_one_pass_without(target, cuts):
    ids = ids_of(target)
    features, last = target.tapped(ids, torch.tensor([12, 12]), (3, 1), last_hidden=True)
    cache = KVCache(target.config, 2, 12, dtype=target.dtype, device=target.device)
    parts = [target.forward(part, cache, (3, 1)) for part in ids.split(cuts, dim=1)]
    torch.testing.assert_close(torch.cat([part[0] for part in parts], 1), last, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.cat([part[1] for part in parts], 1), features, rtol=1e-4, atol=1e-4)
    assert cache.length == 12


def test_rows_of_unlike_length_equal_rows_alone(target):
    ids = ids_of(target, count=3, length=16)
    features, last = target.tapped(ids, torch.tensor([16] * 3), (3, 1), last_hidden=True)
    cache = KVCache(target.config, 3, 20, dtype=target.dtype, device=target.device)
    target.forward(ids[:, :9], cache)
    rows, lengths = [0, 1, 2], [9, 2, 6]
    for growth in ([3, 4, 1], [1, 6, 5], [3, 2]):
        cache.rewind(lengths)
        count = max(growth) + 1  # what is too much in a row is forgotten again
        new = torch.stack([torch.cat([ids[r], ids[0]])[n : n + count] for r, n in zip(rows, lengths)])
        hidden, tapped = target.forward(new, cache, (3, 1))
        for i, (r, n, more) in enumerate(zip(rows, lengths, growth)):
            torch.testing.assert_close(hidden[i, :more], last[r, n : n + more], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(tapped[i, :more], features[r, n : n + more], rtol=1e-4, atol=1e-4)
        lengths = [n + more for n, more in zip(lengths, growth)]
        if len(rows) == 3 and lengths[0] == 13:  # the second row leaves, the last fills its place
            rows, lengths = [0, 2], [lengths[0], lengths[2]]
            cache.keep_rows(torch.tensor(rows))


def test_forward_without_layers_gives_features_of_no_width(tiny):
    cache = KVCache(tiny.config, 1, 4, dtype=tiny.dtype, device=tiny.device)
    hidden, features = tiny.forward(torch.tensor([[1, 2, 3]]), cache)
    assert hidden.shape == (1, 3, tiny.hidden_size) and features.shape == (1, 3, 0)


def test_rows_padded_on_the_left_equal_rows_alone(target):
    ids = ids_of(target)
    _, last = target.tapped(ids, torch.tensor([12, 12]), (0,), last_hidden=True)
    padded = torch.stack([ids[0], torch.cat([ids[1, :0], torch.zeros(5, dtype=torch.long), ids[1, :7]])])
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[1, :5] = False
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = KVCache(target.config, 2, 12, dtype=target.dtype, device=target.device)
    hidden = [
        target.extend(padded[:, a:b], cache, mask[:, :b], positions[:, a:b]) for a, b in ((0, 10), (10, 11), (11, 12))
    ]
    hidden = torch.cat(hidden, 1)
    torch.testing.assert_close(hidden[0], last[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(hidden[1, 5:], last[1, :7], rtol=1e-4, atol=1e-4)


def test_everything_is_frozen(target):
    assert not any(weight.requires_grad for weight in target.model.parameters())
    assert not target.model.training
    assert not target.tapped(ids_of(target), torch.tensor([12, 12]), (1,))[0].requires_grad


def test_the_head_refuses_anything_but_rows():
    head = Head(torch.eye(3))
    with pytest.raises(ValueError, match=r"\(R, D\), got \(1, 2, 3\)"):
        head.logits(torch.zeros(1, 2, 3))


def test_a_head_over_some_tokens_gives_their_logits_and_names_them():
    torch.manual_seed(0)
    head, ids = Head(torch.randn(9, 4), softcap=3.0), torch.tensor([1, 2, 6])
    few, hidden = head.only(ids), torch.randn(50, 4)
    torch.testing.assert_close(few.logits(hidden), head.logits(hidden)[:, ids])
    assert few.greedy(hidden).tolist() == ids[head.logits(hidden)[:, ids].argmax(-1)].tolist()
    rows, known = few.rows(torch.tensor([[0, 1, 2], [6, 7, 8]]))
    assert rows.tolist() == [[0, 0, 1], [2, 0, 0]] and known.tolist() == [[False, True, True], [True, False, False]]
    rows, known = head.rows(torch.tensor([0, 8]))
    assert rows.tolist() == [0, 8] and known.all()


def test_every_kind_of_end_of_text_is_known(folder):
    place = folder(ARCHITECTURES["llama"])
    model = AutoModelForCausalLM.from_pretrained(place)
    model.generation_config.eos_token_id = [10, 258]
    model.config.eos_token_id = 11
    model.save_pretrained(place)
    assert load_target(TargetConfig(model=str(place))).eos_token_ids == {10, 11, 258}


def test_the_fingerprint_tells_weights_and_precisions_apart_and_nothing_else(folder):
    place = folder(ARCHITECTURES["qwen3"])
    config = TargetConfig(model=str(place), dtype="float32")
    first = load_target(config).fingerprint
    assert load_target(config).fingerprint == first
    assert load_target(config.model_copy(update={"dtype": "bfloat16"})).fingerprint != first
    model = AutoModelForCausalLM.from_pretrained(place)
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight.mul_(1.001)
    model.save_pretrained(place)
    assert load_target(config).fingerprint != first


# ---- configurations


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_configuration_loads_without_weights(name, tmp_path):
    ARCHITECTURES[name].save_pretrained(tmp_path)
    config = load_target_config(TargetConfig(model=str(tmp_path)))
    assert (config.model_type, config.num_hidden_layers) == (ARCHITECTURES[name].model_type, 5)


def test_the_text_part_of_a_multimodal_configuration_is_taken(tmp_path):
    Gemma3Config(text_config=ARCHITECTURES["gemma3"].to_dict()).save_pretrained(tmp_path)
    assert load_target_config(TargetConfig(model=str(tmp_path))).hidden_size == 32


def test_a_target_with_recurrent_layers_is_refused(tmp_path):
    Qwen3NextConfig(num_hidden_layers=4).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="attention layers only, got linear_attention"):
        load_target_config(TargetConfig(model=str(tmp_path)))


@pytest.mark.parametrize(
    "config, complaint",
    [
        (GPT2Config(), "expected rope_parameters, gpt2 has none"),
        (Starcoder2Config(), "expected rms_norm_eps, starcoder2 has none"),
        (DeepseekV3Config(), "expected keys and values of one size in all layers, got kv_lora_rank"),
        (LlamaConfig(embedding_multiplier=2.0), "embedding_multiplier is not supported, got llama"),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_a_target_whose_shape_no_draft_can_take_is_refused_without_its_weights(tmp_path, config, complaint):
    config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=complaint):
        load_target_config(TargetConfig(model=str(tmp_path)))


@pytest.mark.parametrize(
    "name, message",
    [
        ("/no/such/place", "no such folder"),
        ("./nowhere", "no such folder"),
        ("nobody/nothing", "can't be loaded"),
    ],
)
def test_a_target_that_is_not_there_is_one_clear_line(name, message, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # no retries
    with pytest.raises(UserError, match=f"^target {name}: {message}") as caught:
        load_target(TargetConfig(model=name))
    assert "\n" not in str(caught.value)


def test_a_hub_that_cannot_be_reached_is_told_before_transformers_tries_again_and_again(monkeypatch):
    def offline(*_, **__):
        raise FileNotFoundError("no connection\nand more")

    def patient(*_, **__):
        raise AssertionError("transformers was asked")

    monkeypatch.setattr(targets, "snapshot_download", offline)
    monkeypatch.setattr(targets.AutoConfig, "from_pretrained", patient)
    with pytest.raises(UserError, match=r"^target someone/model: can't be loaded \(no connection\)$"):
        load_target(TargetConfig(model="someone/model"))


def test_the_home_of_nobody_is_one_clear_line(monkeypatch):
    monkeypatch.setenv("DRAFTLAB_CACHE", "~nobody-at-all/cache")
    for name in ("~nobody-at-all/model", "tiny"):
        with pytest.raises(UserError, match="path ~nobody-at-all/.*: expected a known user's home"):
            load_target_config(TargetConfig(model=name))


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(UserError, match="without config.json"):
        load_target(TargetConfig(model=str(tmp_path)))


@pytest.fixture
def copy(tmp_path):
    """A copy of the tiny target's folder, which a test may damage."""
    return shutil.copytree(load_target_config(TargetConfig(model="tiny"))._name_or_path, tmp_path / "copy")


def rewrite(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda folder: os.truncate(folder / "model.safetensors", 1000), "can't be loaded .*header"),  # cut short
        (lambda folder: os.truncate(folder / "model.safetensors", 0), "can't be loaded .*header"),
        (lambda folder: (folder / "config.json").write_text("{"), "can't be loaded .*JSON"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "can't be loaded"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "can't be loaded .* one of: [^)]"),
        (lambda folder: rewrite(folder, hidden_size=128), "can't be loaded"),
        (lambda folder: rewrite(folder, num_attention_heads=3), "can't be loaded .*not a multiple"),
        (lambda folder: rewrite(folder, num_hidden_layers="4"), "can't be loaded .*expected int"),
        (lambda folder: rewrite(folder, dtype="nonsense"), "can't be loaded"),
        (lambda folder: rewrite(folder, num_hidden_layers=6), "lack 18 weights, such as model.layers.4"),
        (lambda folder: rewrite(folder, tie_word_embeddings=False), "lack 1 weights, such as lm_head"),
        (lambda folder: rewrite(folder, model_type="own", auto_map={"AutoConfig": "x.Y"}), "can't be loaded .*code"),
    ],
)
def test_a_damaged_target_is_one_clear_line(copy, damage, message):
    damage(copy)
    with pytest.raises(UserError, match=f"^target {copy}: .*{message}") as caught:
        load_target(TargetConfig(model=str(copy)))
    assert "\n" not in str(caught.value)


def test_a_model_whose_layers_stand_elsewhere_is_refused(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(targets, "load_target_config", lambda _: GPT2Config())  # which refuses this one before
    tiny.tokenizer.save_pretrained(tmp_path)
    GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=8, n_layer=1, n_head=1)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="expected a decoder with .layers, got GPT2LMHeadModel"):
        load_target(TargetConfig(model=str(tmp_path)))


@pytest.mark.parametrize("device", ["nonsense", "meta"])
def test_a_device_that_can_not_be_used_is_refused_before_anything_is_read(device):
    with pytest.raises(UserError, match=f"target.device: {device}"):
        load_target(TargetConfig(model="/no/such/place", device=device))


# ---- tapped layers


@pytest.mark.parametrize(
    "ids, message",
    [
        ([], "at least one"),
        ([1, 2, 1], "1 more than once"),
        ([0, 4], r"the last layer \(4\)"),
        ([0, 5], "expected 0 to 3 for a target of 5 layers, got 5"),
        ([-1], "expected 0 to 3 for a target of 5 layers, got -1"),
    ],
)
def test_layers_that_can_not_be_tapped_are_refused(ids, message):
    with pytest.raises(UserError, match=message):
        check_layer_ids(ids, 5)


def test_good_layers_pass_in_the_order_given():
    assert check_layer_ids([3, 0, 2], 5) == (3, 0, 2)


def test_the_last_layers_entry_in_transformers_tuple_is_normed_already(tiny):
    ids = ids_of(tiny)
    states = tiny.model(ids, output_hidden_states=True).hidden_states
    _, normed = tiny.tapped(ids, torch.tensor([12, 12]), (0,), last_hidden=True)
    torch.testing.assert_close(states[layer_output_index(tiny.num_layers - 1)], normed)


# ---- the mask token


def words(tokens, template=None, **special):
    """A tokenizer of whole words, with some special tokens."""
    vocabulary = {token: i for i, token in enumerate(["<unk>", "<pad>", "<eos>", "a", "b", *tokens])}
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>")),
        unk_token="<unk>",
        pad_token="<pad>",
        eos_token="<eos>",
        **special,
    )
    made.chat_template = template
    return made


@pytest.mark.parametrize(
    "tokenizer, rows, chosen",
    [
        (words(["<extra_0>", "[MASK]"], mask_token="[MASK]"), 9, "[MASK]"),
        (words(["<unused3>", "<|MASK|>"]), 9, "<|MASK|>"),
        (words(["<|fim|>", "<|reserved_special_token_0|>", "<unused0>"]), 9, "<|reserved_special_token_0|>"),
        (words(["<|fim|>", "<unused0>", "<unused1>"], template="{{ '<unused0>' }}"), 9, "<unused1>"),
        (words(["<|fim|>"], additional_special_tokens=["<|fim|>"]), 6, "<|fim|>"),
    ],
)
def test_the_mask_token_is_the_least_used_there_is(tokenizer, rows, chosen):
    assert tokenizer.convert_ids_to_tokens(choose_mask_token(tokenizer, rows)) == chosen


def test_a_row_beyond_the_tokenizer_is_a_mask_token_before_a_special_one_that_means_something():
    tokenizer = words(["<|fim|>"], additional_special_tokens=["<|fim|>"])
    assert choose_mask_token(tokenizer, 128) == 6


@pytest.mark.parametrize("template", [None, "{{ '<|fim|>' }}"])
def test_no_mask_token_is_better_than_pad_eos_or_a_word(template):
    special = ["<|fim|>"] if template else []
    tokenizer = words(special, template, additional_special_tokens=special)
    with pytest.raises(UserError, match="set draft.mask_token_id"):
        choose_mask_token(tokenizer, len(tokenizer))


def test_rows_that_the_embedding_does_not_have_are_never_chosen():
    assert choose_mask_token(words(["<|fim|>", "<unused0>"], additional_special_tokens=["<|fim|>"]), 6) == 5


# ---- targets made here


def test_tiny_is_the_same_every_time_and_writes_text_that_ends(tiny, monkeypatch, tmp_path):
    monkeypatch.setenv("DRAFTLAB_CACHE", str(tmp_path))
    again = load_target(TargetConfig(model="tiny", dtype="float32"))
    assert again.fingerprint == tiny.fingerprint
    ids = torch.tensor([tiny.chat([{"role": "user", "content": "hi"}])])
    new = again.model.generate(ids, max_new_tokens=200, do_sample=False)[0, ids.shape[1] :]
    text = tiny.tokenizer.decode(new, skip_special_tokens=True)
    assert int(new[-1]) in tiny.eos_token_ids
    assert len(set(text)) > 3 and text.isascii()
    assert tiny.tokenizer.decode([tiny.mask_token_id]) == "<|mask|>"


def test_a_folder_is_made_once_by_any_number_of_workers(tmp_path):
    calls = []

    def make(folder):
        calls.append(folder)
        (folder / "part").write_text("x")
        threading.Event().wait(0.2)
        (folder / "whole").write_text("x")

    seen = []

    def worker():
        folder = targets.made_once(tmp_path / "thing", make)
        seen.append(sorted(file.name for file in folder.iterdir()))

    workers = [threading.Thread(target=worker) for _ in range(4)]
    [thread.start() for thread in workers]
    [thread.join() for thread in workers]
    assert len(calls) == 1 and seen == [["part", "whole"]] * 4


def test_a_half_made_folder_is_never_used(tmp_path):
    def fail(folder):
        (folder / "part").write_text("x")
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError):
        targets.made_once(tmp_path / "thing", fail)
    (tmp_path / ".thing.making-killed").mkdir()  # what a killed process leaves
    folder = targets.made_once(tmp_path / "thing", lambda folder: (folder / "whole").write_text("x"))
    assert [file.name for file in folder.iterdir()] == ["whole"]
    assert not [file for file in tmp_path.iterdir() if "making" in file.name]


def test_a_cache_that_can_not_be_written_is_one_clear_line(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DRAFTLAB_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match="set DRAFTLAB_CACHE"):
        load_target_config(TargetConfig(model="tiny"))


@contextlib.contextmanager
def short_files():
    """No file of this process may grow beyond 10,000 bytes (a disk that is full): pytest's own output neither,
    so the limit ends before the test does.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_weights_that_find_no_room_in_the_cache_are_one_clear_line(tmp_path):
    def make(folder):
        save_file({"weight": torch.zeros(10_000)}, folder / "model.safetensors")

    message = f"cache {tmp_path}: can't be written .*File too large.*set DRAFTLAB_CACHE"
    with short_files(), pytest.raises(UserError, match=message):
        targets.made_once(tmp_path / "thing", make)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_the_cache_may_stand_in_a_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for given in ("~/models", str(tmp_path / "models")):
        monkeypatch.setenv("DRAFTLAB_CACHE", given)
        assert targets.cache_root() == tmp_path / "models"
    monkeypatch.delenv("DRAFTLAB_CACHE")
    assert targets.cache_root() == tmp_path / ".cache" / "draftlab"


def test_the_packaged_target_is_refused_when_its_checksum_differs(monkeypatch, tmp_path):
    monkeypatch.setenv("DRAFTLAB_CACHE", str(tmp_path))
    monkeypatch.setattr(targets, "SMOLLM2_SHA256", "0" * 64)
    with pytest.raises(UserError, match=f"has SHA-256 b179c9523d0e.*, expected {'0' * 64}"):
        load_target(TargetConfig())
    assert not [place for place in (tmp_path / "targets").iterdir() if place.is_dir()]


def test_the_packaged_target_answers():
    target = load_target(TargetConfig(dtype="float32"))
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (30, 576, 49152)
    assert target.eos_token_ids == {target.tokenizer.convert_tokens_to_ids("<|im_end|>")}
    assert target.tokenizer.convert_ids_to_tokens(target.mask_token_id) == "<repo_name>"  # marks code, not chats
    prompt = torch.tensor([target.chat([{"role": "user", "content": "What is the capital of France?"}])])
    cache = KVCache(target.config, 1, 64, dtype=target.dtype, device=target.device)
    ids, new = prompt, []
    while not new or (new[-1] not in target.eos_token_ids and len(new) < 12):
        hidden, _ = target.forward(ids, cache)
        new.append(int(target.ends.head.logits(hidden[:, -1]).argmax()))
        ids = torch.tensor([[new[-1]]])
    assert target.tokenizer.decode(new) == "The capital of France is Paris.<|im_end|>"


def test_a_template_that_tells_the_date_is_told_the_same_every_day(copy):
    template = """{% set today = strftime_now("%d %B %Y") %}{{ today ~ strftime_now( format='%H' ) }}"""
    template += "{{ messages[0]['content'] }}"
    tokenizer = AutoTokenizer.from_pretrained(copy)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(copy)
    target = load_target(TargetConfig(model=str(copy)))
    assert target.render([{"role": "user", "content": "!"}], tokenize=False) == f"{targets.TODAY:%d %B %Y%H}!"


def test_a_target_without_a_chat_template_says_so(tiny):
    tokenizer = AutoTokenizer.from_pretrained(tiny.model.config._name_or_path)
    tokenizer.chat_template = None
    target = targets.Target(tiny.model, tokenizer, "bare")
    with pytest.raises(UserError, match="target bare: its tokenizer has no chat template"):
        target.chat([{"role": "user", "content": "hi"}])
