"""The target's hidden states over a corpus: one target pass kept on disk and read by every trial.

A store is a folder with one file per column, a record per token:

    ids.bin, supervised.bin      the corpus: int32, bool
    layer_007.bin, last.bin      hidden states of the target: bfloat16
    meta.json                    what the columns belong to, and how long each row is
    journal.jsonl                a line per finished chunk, with a checksum for every row of every column

A chunk is the rows that go through the target together; it is the unit of building, resuming and repair. Chunks follow
each other in every column, longest rows first. A row exists in a column when its bytes match its checksum: a build
writes the bytes and then the journal line, so whatever is missing, half-written or damaged is simply not there and is
built (again). Layers are separate columns: a trial reads only its own, and a new layer leaves the others alone.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from draftlab.config import FeaturesConfig, digest
from draftlab.errors import UserError
from draftlab.target import cache_root, check_layer_ids

if TYPE_CHECKING:
    from draftlab.corpus import Corpus
    from draftlab.target import Target

FORMAT = 1
"""Version of the folder's format and of what the columns mean; it is part of a store's name."""

SAY_EVERY = 5.0
"""Seconds between progress lines."""


@dataclass
class Batch:
    """Rows of the corpus with the target's hidden states, right-padded with zeros."""

    ids: Tensor
    """(N, S) int64."""
    supervised: Tensor
    """(N, S) bool."""
    lengths: Tensor
    """(N,) int64, tokens of each row."""
    features: Tensor
    """(N, S, T*D) bfloat16, the tapped layers in the order that was asked for."""
    rows: Tensor
    """(N,) int64, indices into `Corpus.rows`."""
    last_hidden: Tensor | None
    """(N, S, D) bfloat16, the target's final-normed hidden state; None unless asked for."""

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on a device."""
        return Batch(**{name: None if x is None else x.to(device) for name, x in vars(self).items()})


class Features(Protocol):
    """Where training gets its batches from."""

    layer_ids: tuple[int, ...]

    def batch(self, rows: Sequence[int]) -> Batch:
        """These rows of the corpus, in this order."""


class OnlineFeatures:
    """Hidden states computed when they are asked for, for corpora too large to store.

    Batches are on the target's device. They equal a store's but for rounding, which may depend on a row's neighbours.
    """

    def __init__(self, target: Target, corpus: Corpus, layer_ids: Sequence[int], last_hidden: bool = False) -> None:
        self.target, self.corpus = target, corpus
        self.layer_ids, self.last_hidden = tuple(layer_ids), last_hidden

    def batch(self, rows: Sequence[int]) -> Batch:
        """These rows of the corpus, in this order."""
        chosen = [self.corpus.rows[row] for row in rows]
        lengths = [len(row.ids) for row in chosen]
        ids, supervised = (np.zeros((len(rows), max(lengths)), dtype) for dtype in (np.int64, bool))
        for i, row in enumerate(chosen):
            ids[i, : lengths[i]], supervised[i, : lengths[i]] = row.ids, row.supervised
        device = self.target.device
        ids, supervised, lengths, rows = (torch.as_tensor(x, device=device) for x in (ids, supervised, lengths, rows))
        features, last = self.target.tapped(ids, lengths, self.layer_ids, self.last_hidden)
        last = last.to(torch.bfloat16) if self.last_hidden else None
        return Batch(ids, supervised, lengths, features.to(torch.bfloat16), rows, last)


class StoredFeatures:
    """Hidden states read from a store, memory-mapped; a row is checked when it is first read.

    Made by `open_store`. Batches are on the CPU.
    """

    def __init__(self, store: _Store, layer_ids: Sequence[int], last_hidden: bool = False) -> None:
        self.layer_ids, self.last_hidden = tuple(layer_ids), last_hidden
        self._store = store
        self._columns = {name: store.column(name) for name in _names(layer_ids, last_hidden)}
        self._checked: set[int] = set()

    def batch(self, rows: Sequence[int]) -> Batch:
        """These rows of the corpus, in this order.

        Raises:
            UserError: a row was damaged since the store was built.
        """
        store, layers = self._store, len(self.layer_ids)
        lengths = [int(store.lengths[row]) for row in rows]
        shape = len(rows), max(lengths)
        ids, supervised = np.zeros(shape, np.int64), np.zeros(shape, bool)
        hidden = np.zeros((*shape, len(self._columns) - 2, store.width), np.int16)
        for i, (row, length) in enumerate(zip(rows, lengths)):
            if row not in self._checked:
                self._check(row)
            pieces = [column[store.span(row)] for column in self._columns.values()]
            ids[i, :length], supervised[i, :length] = pieces[:2]
            for t, piece in enumerate(pieces[2:]):
                hidden[i, :length, t] = piece
        states = torch.from_numpy(hidden).view(torch.bfloat16)
        return Batch(
            ids=torch.from_numpy(ids),
            supervised=torch.from_numpy(supervised),
            lengths=torch.as_tensor(lengths),
            features=states[:, :, :layers].flatten(2),
            rows=torch.as_tensor(rows),
            last_hidden=states[:, :, layers] if self.last_hidden else None,
        )

    def _check(self, row: int) -> None:
        for name, column in self._columns.items():
            if not self._store.holds(name, column, row):
                raise UserError(
                    f"feature store {self._store.folder}: row {row} of {name}.bin is damaged; "
                    "start the run again, and it will be found and rebuilt"
                )
        self._checked.add(row)


def open_store(folder: str | Path, layer_ids: Sequence[int], last_hidden: bool = False) -> StoredFeatures:
    """Open a finished store for reading; neither the target nor the corpus is needed.

    Args:
        folder: as `build` returned it.
        layer_ids: tapped layers, in the order in which their states are joined.
        last_hidden: also read the target's last hidden state.

    Raises:
        UserError: no store there, or one that lacks some of what is asked for.
    """
    store = _Store.find(Path(folder))
    if store is None:
        raise UserError(f"{folder}: expected a feature store of format {FORMAT}, found none")
    for name in _names(layer_ids, last_hidden):
        missing = int((store.sums[name] < 0).sum())
        if missing or not store.fits(name):
            raise UserError(
                f"feature store {folder}: {name}.bin is not complete (rows without a checksum: {missing} of "
                f"{len(store.lengths)}; bytes expected: {store.size(name)}); build it first"
            )
    return StoredFeatures(store, layer_ids, last_hidden)


def estimate_bytes(tokens: int, layer_ids: Sequence[int], hidden_size: int, last_hidden: bool = False) -> int:
    """Disk space of a store over so many tokens, in bytes."""
    return _bytes(_names(layer_ids, last_hidden), hidden_size) * tokens


def build(
    target: Target,
    corpus: Corpus,
    layer_ids: Sequence[int],
    config: FeaturesConfig,
    say: Callable[..., None],
    root: Path | None = None,
) -> Path:
    """Make sure that a store holds these layers over the whole corpus, undamaged; compute only what it lacks.

    Every stored byte of these layers is checked. A build may be interrupted at any moment, and several processes may
    build at once: one works, the others wait and find the work done.

    Args:
        layer_ids: decoder layers, 0-based, read at each layer's output.
        config: `last_hidden` adds the target's last hidden state; `batch_tokens` shapes the target's forwards (a store
            keeps the shape that it was begun with, so that all its columns are computed alike).
        say: shows progress.
        root: folder of all stores; None is `features` in the cache.

    Returns:
        The store's folder, for `open_store`.

    Raises:
        UserError: bad layer ids, not enough disk space, or a folder that can't be written.
    """
    layer_ids = check_layer_ids(layer_ids, target.num_layers)
    names = _names(layer_ids, config.last_hidden)
    owner = {"format": FORMAT, "target": target.fingerprint, "corpus": corpus.fingerprint}
    folder = (root or cache_root() / "features") / digest(owner)
    owner |= {"width": target.hidden_size, "lengths": [len(row.ids) for row in corpus.rows]}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder / "lock", say):
            store = _Store.find(folder, owner) or _Store.create(folder, owner | {"batch_tokens": config.batch_tokens})
            say(f"features: {store.tokens:,} tokens of {len(names) - 2} layers in {folder}", doing="checking features")
            lacking = store.lacking(names)
            if lacking:
                _fill(store, lacking, target, corpus, say)
            else:
                say("features: all there and sound, nothing to do")
    except OSError as error:
        raise UserError(f"feature store {folder}: can't be written ({error.strerror or error})") from error
    return folder


def _fill(
    store: _Store, lacking: dict[int, list[str]], target: Target, corpus: Corpus, say: Callable[..., None]
) -> None:
    """Compute what each chunk lacks."""
    tokens = {chunk: int(store.lengths[store.chunks[chunk]].sum()) for chunk in lacking}
    total = sum(tokens.values())
    needed = sum(tokens[chunk] * _bytes(names, store.width) for chunk, names in lacking.items())
    free = shutil.disk_usage(store.folder).free
    if needed > free:
        raise UserError(
            f"features need {needed / 1e9:.2f} GB of disk, {free / 1e9:.2f} GB are free in {store.folder}; make room, "
            "set DRAFTLAB_CACHE to a larger disk, use fewer conversations or layers, or features.mode=online"
        )
    damaged = sum(any(store.sums[name][store.chunks[chunk][0]] >= 0 for name in lacking[chunk]) for chunk in lacking)
    note = f" ({damaged} damaged chunks)" if damaged else ""
    say(f"features: running the target over {total:,} tokens, {needed / 1e9:.2f} GB{note}", doing="building features")
    done, start = 0, time.monotonic()
    said = start
    for chunk, names in lacking.items():
        store.write(chunk, _columns(target, corpus, store.chunks[chunk], names))
        done += tokens[chunk]
        now = time.monotonic()
        if now - said >= SAY_EVERY or done == total:
            said, rate = now, done / (now - start)
            left = f"{(total - done) / rate:.0f} s left" if done < total else "done"
            say(f"features: {done / total:.0%}, {rate:,.0f} tokens/s, {left}")


def _columns(target: Target, corpus: Corpus, rows: np.ndarray, names: Sequence[str]) -> dict[str, np.ndarray]:
    """The named columns of a chunk, computed by the target: (tokens of the chunk, ...) each."""
    layers = [name for name in names if name.startswith("layer_")]
    online = OnlineFeatures(target, corpus, [int(name.removeprefix("layer_")) for name in layers], "last" in names)
    batch = online.batch(rows)
    real = torch.arange(batch.ids.shape[1], device=batch.ids.device) < batch.lengths[:, None]
    columns = {"ids": batch.ids[real].int(), "supervised": batch.supervised[real]}
    columns |= zip(layers, batch.features[real].view(torch.int16).split(target.hidden_size, dim=-1))
    if batch.last_hidden is not None:
        columns["last"] = batch.last_hidden[real].view(torch.int16)
    return {name: columns[name].contiguous().cpu().numpy() for name in names}


class _Store:
    """The folder: where each row stands in the columns, and which rows exist."""

    def __init__(self, folder: Path, meta: dict[str, Any]) -> None:
        self.folder, self.width = folder, meta["width"]
        self.lengths = np.array(meta["lengths"], np.int64)  # (rows,), in tokens
        self.tokens = int(self.lengths.sum())
        order = np.argsort(-self.lengths, kind="stable")  # longest first: a batch too large for memory fails at once
        self.chunks = _chunks(order, self.lengths, meta["batch_tokens"])
        ends = np.empty_like(self.lengths)
        ends[order] = self.lengths[order].cumsum()
        self.starts = ends - self.lengths  # (rows,), in tokens
        self.journal = folder / "journal.jsonl"
        self.sums = self._read_journal()

    @classmethod
    def find(cls, folder: Path, owner: dict[str, Any] | None = None) -> _Store | None:
        """The folder's store; None if its meta.json is missing, unreadable or about something else."""
        try:
            meta = json.loads((folder / "meta.json").read_bytes())
            mine = meta["format"] == FORMAT if owner is None else meta == owner | {"batch_tokens": meta["batch_tokens"]}
            return cls(folder, meta) if mine else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    @classmethod
    def create(cls, folder: Path, meta: dict[str, Any]) -> _Store:
        part = folder / "meta.part"
        part.write_text(json.dumps(meta))
        os.replace(part, folder / "meta.json")
        return cls(folder, meta)

    def _read_journal(self) -> dict[str, np.ndarray]:
        """Column -> (rows,) checksums, -1 where there is none; a later line replaces an earlier one."""
        sums: dict[str, np.ndarray] = defaultdict(lambda: np.full(len(self.lengths), -1, np.int64))
        for line in self.journal.read_bytes().splitlines() if self.journal.exists() else []:
            try:
                entry = json.loads(line)
                for name, values in entry["sums"].items():
                    sums[name][self.chunks[entry["chunk"]]] = values
            except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError):
                continue  # half-written or damaged: what it vouched for doesn't exist
        return sums

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.bin"

    def size(self, name: str) -> int:
        return self.tokens * _bytes([name], self.width)

    def fits(self, name: str) -> bool:
        return self.path(name).is_file() and self.path(name).stat().st_size == self.size(name)

    def span(self, row: int) -> slice:
        return slice(self.starts[row], self.starts[row] + self.lengths[row])

    def column(self, name: str) -> np.memmap:
        """(tokens,) or (tokens, width), read only."""
        return np.memmap(self.path(name), _record(name, self.width), mode="r", shape=(self.tokens,))

    def holds(self, name: str, column: np.ndarray, row: int) -> bool:
        """Whether a row of a column exists: its bytes match its checksum."""
        return self.sums[name][row] >= 0 and zlib.crc32(column[self.span(row)]) == self.sums[name][row]

    def lacking(self, names: Sequence[str]) -> dict[int, list[str]]:
        """Chunk -> the columns in which a row of it doesn't exist; chunks that lack nothing are left out."""
        for name in names:
            if not self.fits(name):  # the rows that a shortened file lost become zeros, which fail their checksums
                with open(self.path(name), "ab") as file:
                    file.truncate(self.size(name))
        columns = {name: self.column(name) for name in names}
        lacking = {
            chunk: [name for name in names if not all(self.holds(name, columns[name], row) for row in rows)]
            for chunk, rows in enumerate(self.chunks)
        }
        return {chunk: missing for chunk, missing in lacking.items() if missing}

    def write(self, chunk: int, columns: dict[str, np.ndarray]) -> None:
        """Write columns of a chunk, (its tokens, ...) each, and then its journal line."""
        rows = self.chunks[chunk]
        sums = {}
        for name, data in columns.items():
            with open(self.path(name), "r+b") as file:
                file.seek(self.starts[rows[0]] * _bytes([name], self.width))
                file.write(data)
            sums[name] = [zlib.crc32(piece) for piece in np.split(data, self.lengths[rows].cumsum()[:-1])]
        with open(self.journal, "ab") as file:  # the line break first: it ends a line that was left half-written
            file.write(b"\n" + json.dumps({"chunk": chunk, "sums": sums}).encode())


def _names(layer_ids: Sequence[int], last_hidden: bool) -> list[str]:
    """The columns behind a batch: the corpus, then the layers in order, then the last hidden state."""
    return ["ids", "supervised", *(f"layer_{layer:03d}" for layer in layer_ids), *(["last"] if last_hidden else [])]


def _record(name: str, width: int) -> np.dtype:
    """What a column holds of one token. numpy has no bfloat16: its bits travel as int16."""
    return {"ids": np.dtype(np.int32), "supervised": np.dtype(bool)}.get(name, np.dtype((np.int16, width)))


def _bytes(names: Sequence[str], width: int) -> int:
    """Bytes of one token in these columns."""
    return sum(_record(name, width).itemsize for name in names)


def _chunks(order: np.ndarray, lengths: np.ndarray, batch_tokens: int) -> list[np.ndarray]:
    """Rows, longest first, cut into chunks of at most batch_tokens with their padding; one row at least."""
    chunks, start = [], 0
    while start < len(order):
        end = start + max(1, batch_tokens // int(lengths[order[start]]))
        chunks.append(order[start:end])
        start = end
    return chunks


@contextmanager
def _lock(path: Path, say: Callable[..., None]) -> Iterator[None]:
    """Hold a lock file; the system frees it when the process ends, however it ends."""
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"features: another process is building in {path.parent}; waiting for it", doing="waiting")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
