"""The cache against transformers' own growing one, on models with and without sliding windows."""

import random
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, Gemma3TextConfig, LlamaConfig, Qwen3Config

from draftlab.cache import KVCache, packed

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
CONFIGS = {
    "llama": LlamaConfig(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE, head_dim=16),
    "gemma3": Gemma3TextConfig(**SHAPE, head_dim=8, query_pre_attn_scalar=8, sliding_window=4),
}
LENGTH = 15


@pytest.fixture(scope="module", params=CONFIGS)
def model(request):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[request.param], attn_implementation="sdpa").eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    return model.requires_grad_(False)


@pytest.fixture
def ids():
    return torch.randint(1, 64, (3, LENGTH), generator=torch.Generator().manual_seed(2))


def new_cache(model, batch=3, length=LENGTH):
    return KVCache(model.config, batch, length, dtype=torch.float32, device="cpu")


def logits(model, ids, cache):
    return model(ids, cache=cache, use_cache=True).logits


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_the_gemma_used_here_has_both_kinds_of_layers():
    assert set(CONFIGS["gemma3"].layer_types) == {"sliding_attention", "full_attention"}


@pytest.mark.parametrize("cuts", [(LENGTH,), (1,) * LENGTH, (4, 1, 7, 1, 2)])
def test_it_gives_what_transformers_own_cache_gives(model, ids, cuts):
    ours, theirs = new_cache(model), DynamicCache(config=model.config)
    for part in ids.split(cuts, dim=1):
        close(logits(model, part, ours), logits(model, part, theirs))
    assert ours.length == LENGTH == ours.get_seq_length()


def test_after_a_rewind_it_is_as_if_the_rest_had_never_been_seen(model, ids):
    cache = new_cache(model)
    logits(model, ids[:, :9], cache)
    logits(model, ids[:, 9:14].flip(1), cache)  # a rejected block
    cache.rewind(10)
    cache.rewind(9)
    close(logits(model, ids[:, 9:], cache), model(ids).logits[:, 9:])


def test_rows_that_leave_take_nothing_with_them(model, ids):
    cache = new_cache(model)
    logits(model, ids[:, :8], cache)
    for index in ([2, 1], [1]):  # a hole filled from the end, then the first row dropped
        cache.keep_rows(torch.tensor(index))
        ids = ids[index]
        start = cache.length
        close(logits(model, ids[:, start : start + 3], cache), model(ids).logits[:, start : start + 3])


def test_nothing_is_allocated_again(model, ids):
    cache = new_cache(model)
    places = [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in cache.layers]
    logits(model, ids[:, :8], cache)
    cache.keep_rows(torch.tensor([2, 1]))
    cache.rewind(5)
    logits(model, ids[[2, 1], 5:], cache)
    assert [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in cache.layers] == places


def test_rows_of_unlike_length_are_written_each_at_its_own_end():
    config = LlamaConfig(**SHAPE)
    cache = KVCache(config, 3, LENGTH, dtype=torch.float32, device="cpu")
    layer, shape = cache.layers[0], (3, 2, 4, 8)
    for kept in cache.layers:
        kept.update(torch.ones(shape), torch.ones(shape))
    cache.rewind([4, 1, 2])
    assert cache.length == 4 and cache.behind.tolist() == [0, 3, 2]
    assert cache.positions(2).tolist() == [[4, 5], [1, 2], [2, 3]]
    keys, values = layer.update(2 * torch.ones(3, 2, 2, 8), 3 * torch.ones(3, 2, 2, 8))
    assert keys[:, 0, :, 0].tolist() == [[1, 1, 1, 1, 2, 2], [1, 2, 2, 1, 0, 0], [1, 1, 2, 2, 0, 0]]
    assert values[:, 1, :, 7].tolist() == [[1, 1, 1, 1, 3, 3], [1, 3, 3, 1, 0, 0], [1, 1, 3, 3, 0, 0]]
    for kept in cache.layers[1:]:
        kept.update(torch.ones(3, 2, 2, 8), torch.ones(3, 2, 2, 8))
    cache.rewind([3, 3, 3])
    assert cache.behind is None and cache.positions(2).tolist() == [[3, 4]]


def test_rows_from_the_end_fill_the_holes_of_those_that_leave():
    rng = random.Random(0)
    for _ in range(50):
        stay = [rng.random() < 0.6 for _ in range(rng.randint(0, 9))]
        index = packed(stay)
        assert sorted(index) == [row for row, stays in enumerate(stay) if stays]
        assert all(index[row] == row for row in range(len(index)) if stay[row])


def test_more_than_it_holds_is_refused(model, ids):
    cache = new_cache(model, length=LENGTH - 1)
    logits(model, ids[:, :8], cache)
    with pytest.raises(ValueError, match=f"holds {LENGTH - 1} positions, {LENGTH} were needed"):
        logits(model, ids[:, 8:], cache)


@pytest.mark.parametrize("length", [-1, 9, [8, 9, 3], [8, 3, -1]])
def test_it_can_not_be_rewound_to_where_it_never_was(model, ids, length):
    cache = new_cache(model)
    logits(model, ids[:, :8], cache)
    with pytest.raises(ValueError, match=re.escape(f"0 to 8, got {length}")):
        cache.rewind(length)
