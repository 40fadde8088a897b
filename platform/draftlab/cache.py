"""Key and value buffers of a decoder, allocated once and cheap to rewind."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin


class KVCache(Cache):
    """Keys and values of every layer in buffers of a fixed size, written in place.

    transformers' growing cache copies everything at each token, and forgets what has left a sliding window, so it
    can't be rewound. Here nothing moves, all positions are kept, and the attention mask does the windowing.

    A token's place in the buffer is its position in the text, in every row. So rows of one length need no mask and are
    appended to as one slice; rows of unlike length are written each at its own end, and their readers need a mask.

    Args:
        config: the target's text configuration, or a draft's shape.
        batch: N, rows.
        max_length: most positions of a row.
    """

    def __init__(
        self, config: PreTrainedConfig, batch: int, max_length: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        # (keys or values, layer, N, heads, max_length, head_dim); zeros, since what a mask hides is still multiplied.
        shape = (2, config.num_hidden_layers, batch, heads, max_length, head_dim)
        keys, values = torch.zeros(shape, dtype=dtype, device=device)
        super().__init__(layers=[_Layer(k, v) for k, v in zip(keys, values)])
        self.max_length = max_length

    @property
    def length(self) -> int:
        """Positions filled so far, in the longest row."""
        return self.layers[0].length

    @property
    def behind(self) -> Tensor | None:
        """(N,) by how many positions each row is shorter than the longest; None where all are of one length."""
        return self.layers[0].behind

    def positions(self, count: int) -> Tensor:
        """(N, count), or (1, count) where all rows are of one length: where the next tokens will stand."""
        return self.layers[0].positions(count)

    def rewind(self, length: int | Sequence[int]) -> None:
        """Forget every position from `length` on: one length for all rows, or each row's own.

        Raises:
            ValueError: longer than what is there.
        """
        lengths = [length] if isinstance(length, int) else length
        longest, shortest = max(lengths, default=0), min(lengths, default=0)
        if not 0 <= shortest <= longest <= self.length:
            raise ValueError(f"expected a length of 0 to {self.length}, got {length}")
        behind = None
        if shortest < longest:
            behind = torch.tensor([longest - n for n in lengths], device=self.layers[0].keys.device)
        for layer in self.layers:
            layer.length, layer.behind = longest, behind

    def keep_rows(self, index: Tensor) -> None:
        """Keep these batch rows, (N',) indices, in this order, and drop the others."""
        for layer in self.layers:
            layer.keep_rows(index)


class _Layer(CacheLayerMixin):
    """One layer's buffers, in the form that transformers' attention and mask functions ask for."""

    is_sliding = False  # no position is ever dropped; see KVCache
    is_croppable = True

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.length, self.behind = 0, None
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is left to do: the buffers exist from the start."""

    def positions(self, count: int) -> Tensor:
        ahead = torch.arange(self.length, self.length + count, device=self.keys.device)[None]
        return ahead if self.behind is None else ahead - self.behind[:, None]

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Write (N, heads, n, head_dim) after what is there; views of everything so far, up to the longest row."""
        end = self.length + key_states.shape[2]
        if end > self.keys.shape[2]:
            raise ValueError(f"the cache holds {self.keys.shape[2]} positions, {end} were needed")
        if self.behind is None:
            self.keys[:, :, self.length : end] = key_states
            self.values[:, :, self.length : end] = value_states
        else:
            rows = torch.arange(len(self.behind), device=self.keys.device)[:, None]
            places = rows, slice(None), self.positions(key_states.shape[2])
            self.keys[places] = key_states.transpose(1, 2)
            self.values[places] = value_states.transpose(1, 2)
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def keep_rows(self, index: Tensor) -> None:
        index = index.to(self.keys.device)
        to = torch.arange(len(index), device=index.device)
        to, moved = to[index != to], index[index != to]  # a caller that fills holes from the end moves little
        for buffer in (self.keys, self.values):
            buffer[to, :, : self.length] = buffer[moved, :, : self.length]
        self.keys, self.values = self.keys[: len(index)], self.values[: len(index)]
        self.behind = None if self.behind is None else self.behind[index]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys that the next queries will see, position of the first)."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.keys.shape[2]

    def crop(self, tokens_to_remove: int) -> None:
        self.length -= abs(tokens_to_remove)

    def reset(self) -> None:
        self.length, self.behind = 0, None


def packed(stay: Sequence[bool]) -> list[int]:
    """The rows that stay, in the order for `keep_rows` that moves the fewest: rows from the end fill the holes."""
    count = sum(stay)
    movers = (row for row in range(count, len(stay)) if stay[row])
    return [row if stay[row] else next(movers) for row in range(count)]
