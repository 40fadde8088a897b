"""The feature store: equal to the target, cheap to repeat, hard to break."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from draftlab import features
from draftlab.config import FeaturesConfig, TargetConfig
from draftlab.corpus import Corpus, Row
from draftlab.errors import UserError
from draftlab.target import load_target

LAYERS = (0, 1, 2)


def random_corpus(count: int = 24, seed: int = 0) -> Corpus:
    """Rows of very different lengths."""
    random = np.random.default_rng(seed)
    rows = [
        Row(random.integers(0, 250, length).astype(np.int32), random.random(length) < 0.5, (), str(number))
        for number, length in enumerate(random.integers(1, 50, count))
    ]
    return Corpus(rows, train=list(range(1, count)), heldout=[0], fingerprint=f"random-{count}-{seed}", source="test")


class Counting:
    """The tiny target, noting the passes that it is asked for; `at_pass` sees the number of each."""

    def __init__(self, target) -> None:
        self._target = target
        self.at_pass = lambda number: None
        self.passes: list[tuple[tuple[int, ...], bool]] = []

    def __getattr__(self, name):
        return getattr(self._target, name)

    def tapped(self, ids, lengths, layer_ids, last_hidden=False):
        self.passes.append((tuple(layer_ids), last_hidden))
        self.at_pass(len(self.passes))
        return self._target.tapped(ids, lengths, layer_ids, last_hidden)


class Said(list):
    """A `say` that remembers."""

    def __call__(self, text: str, *, doing: str | None = None) -> None:
        self.append(text)


CONFIG = FeaturesConfig(batch_tokens=128)
CORPUS = random_corpus()
TOKENS = sum(len(row.ids) for row in CORPUS.rows)


@pytest.fixture(scope="module")
def tiny():
    return load_target(TargetConfig(model="tiny"))


@pytest.fixture
def target(tiny):
    return Counting(tiny)


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory) -> Path:
    """A store of every layer and the last hidden state, built at one go; not to be written to."""
    config = CONFIG.model_copy(update={"last_hidden": True})
    return features.build(tiny, CORPUS, LAYERS, config, Said(), tmp_path_factory.mktemp("stores"))


@pytest.fixture
def store(finished, tmp_path) -> Path:
    """A copy of the finished store that a test may damage."""
    return shutil.copytree(finished, tmp_path / finished.name)


def columns(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.bin")}


def chunks(corpus: Corpus, batch_tokens: int) -> list[list[int]]:
    """By hand: rows by falling length, as many as fit."""
    left = sorted(range(len(corpus.rows)), key=lambda row: -len(corpus.rows[row].ids))
    result = []
    while left:
        count = max(1, batch_tokens // len(corpus.rows[left[0]].ids))
        result.append(left[:count])
        left = left[count:]
    return result


def rebuild(store: Path, target, said: Said | None = None) -> Path:
    config = CONFIG.model_copy(update={"last_hidden": True})
    return features.build(target, CORPUS, LAYERS, config, said if said is not None else Said(), store.parent)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def same(a: features.Batch, b: features.Batch) -> bool:
    return all(x is y if x is None else torch.equal(x, y) for x, y in zip(vars(a).values(), vars(b).values()))


# ---- what is stored


def test_stored_states_equal_a_direct_pass_of_the_target_bit_for_bit(tiny, finished):
    layers = (2, 0)
    stored = features.open_store(finished, layers, last_hidden=True)
    for rows in chunks(CORPUS, CONFIG.batch_tokens):
        lengths = torch.tensor([len(CORPUS.rows[row].ids) for row in rows])
        ids = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
        for i, row in enumerate(rows):
            ids[i, : lengths[i]] = torch.from_numpy(CORPUS.rows[row].ids)
        direct, last = tiny.tapped(ids, lengths, layers, last_hidden=True)
        batch = stored.batch(rows)
        assert batch.features.dtype == direct.dtype == torch.bfloat16
        assert torch.equal(batch.ids, ids) and torch.equal(batch.lengths, lengths)
        assert torch.equal(batch.features, direct) and torch.equal(batch.last_hidden, last)
        assert batch.features.abs().sum() > 0


def test_the_corpus_comes_back_with_its_supervision_in_the_order_asked_for(finished):
    rows = [7, 3, 3, 20]
    batch = features.open_store(finished, (1,)).batch(rows)
    assert batch.rows.tolist() == rows and batch.last_hidden is None
    for i, row in enumerate(rows):
        length = int(batch.lengths[i])
        assert batch.ids[i, :length].tolist() == CORPUS.rows[row].ids.tolist()
        assert batch.supervised[i, :length].tolist() == CORPUS.rows[row].supervised.tolist()
        assert not batch.ids[i, length:].any() and not batch.supervised[i, length:].any()
        assert not batch.features[i, length:].any()


def test_online_features_give_the_same_batches_as_stored_ones(tiny, finished):
    stored = features.open_store(finished, (0, 2), last_hidden=True)
    online = features.OnlineFeatures(tiny, CORPUS, (0, 2), last_hidden=True)
    for rows in chunks(CORPUS, CONFIG.batch_tokens):  # the target's own batches: bit for bit
        assert same(stored.batch(rows), online.batch(rows))


def test_a_float32_target_is_kept_in_bfloat16_whatever_the_batch(tmp_path):
    target = load_target(TargetConfig(model="tiny", dtype="float32"))
    stored = features.open_store(features.build(target, CORPUS, (1, 2), CONFIG, Said(), tmp_path), (1, 2))
    online = features.OnlineFeatures(target, CORPUS, (1, 2))
    for rows in ([5, 0, 11], [2], range(24)):
        a, b = stored.batch(rows), online.batch(rows)
        assert torch.equal(a.ids, b.ids) and torch.equal(a.supervised, b.supervised) and torch.equal(a.rows, b.rows)
        assert a.features.dtype == b.features.dtype == torch.bfloat16
        torch.testing.assert_close(a.features, b.features, rtol=2**-7, atol=1e-4)  # the last bit of 8


@pytest.mark.parametrize("kind", ["stored", "online"])
def test_a_draft_can_learn_from_a_batch(tiny, finished, kind):
    online = features.OnlineFeatures(tiny, CORPUS, (0, 1))
    source = online if kind == "online" else features.open_store(finished, (0, 1))
    layer = torch.nn.Linear(2 * tiny.hidden_size, 1)
    layer(source.batch([0, 1]).to("cpu").features.float()).sum().backward()
    assert layer.weight.grad.abs().sum() > 0


def test_the_estimate_is_the_size_on_disk(tiny, finished):
    size = sum(len(data) for data in columns(finished).values())
    assert features.estimate_bytes(TOKENS, LAYERS, tiny.hidden_size, last_hidden=True) == size


def test_chunks_keep_to_the_tokens_of_a_batch_and_take_a_longer_row_alone(tiny, tmp_path):
    target = Counting(tiny)
    features.build(target, CORPUS, (1,), FeaturesConfig(batch_tokens=1), Said(), tmp_path)
    assert len(target.passes) == len(CORPUS.rows)


# ---- nothing is computed twice


def test_a_second_build_runs_no_target_and_says_so(store, target):
    before, said = columns(store), Said()
    assert rebuild(store, target, said) == store
    assert target.passes == [] and columns(store) == before
    assert "nothing to do" in said[-1]


def test_a_new_layer_joins_without_computing_the_others_again(target, tmp_path, finished):
    folder = features.build(target, CORPUS, (1,), CONFIG, Said(), tmp_path)
    before = len(target.passes)
    assert features.build(target, CORPUS, LAYERS, CONFIG, Said(), tmp_path) == folder
    assert set(target.passes[:before]) == {((1,), False)} and set(target.passes[before:]) == {((0, 2), False)}
    last = CONFIG.model_copy(update={"last_hidden": True})
    features.build(target, CORPUS, (1,), last, Said(), tmp_path)
    assert set(target.passes[2 * before :]) == {((), True)}
    assert columns(folder) == columns(finished)  # as if built at one go


def test_a_store_keeps_the_batches_that_it_was_begun_with(store, target):
    config = FeaturesConfig(batch_tokens=4096, last_hidden=True)
    features.build(target, CORPUS, LAYERS, config, Said(), store.parent)
    assert target.passes == []


def test_another_corpus_has_a_store_of_its_own(target, store):
    assert features.build(target, random_corpus(seed=1), (1,), CONFIG, Said(), store.parent) != store


# ---- interruption, damage, company

CHILD = """
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, {here!r})
import test_features as t
from draftlab import features

target, say = t.Counting(t.load_target(t.TargetConfig(model="tiny"))), t.Said()
{setup}
features.build(target, t.CORPUS, t.LAYERS, t.CONFIG, say, Path(sys.argv[1]))
print(len(target.passes))
"""

DIE_IN_A_PASS = """
def at_pass(number):
    if number == 4:
        os.kill(os.getpid(), signal.SIGKILL)
target.at_pass = at_pass
"""

DIE_IN_A_WRITE = """
crc32 = features.zlib.crc32
def dying(data):  # the chunk's first column is written by now, its journal line is not
    if len(target.passes) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return crc32(data)
features.zlib.crc32 = dying
"""

WORK_UNTIL_ANOTHER_WAITS = """
def at_pass(number):
    while number == 2 and not Path({waiting!r}).exists():
        time.sleep(0.05)
target.at_pass = at_pass
"""

TELL_WHEN_WAITING = """
def say(text, doing=None):
    if "waiting" in text:
        Path({waiting!r}).touch()
"""


@pytest.fixture
def child():
    """Start another process that builds the store of CORPUS, and prints how many passes it made."""
    processes = []

    def start(root: Path, setup: str) -> subprocess.Popen:
        code = CHILD.format(here=str(Path(__file__).parent), setup=setup)
        command, environment = [sys.executable, "-c", code, str(root)], os.environ | {"OMP_NUM_THREADS": "1"}
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.parametrize("setup", [DIE_IN_A_PASS, DIE_IN_A_WRITE], ids=["pass", "write"])
def test_a_killed_build_goes_on_where_it_was_and_ends_as_an_uninterrupted_one(child, target, tmp_path, finished, setup):
    process = child(tmp_path, setup)
    process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL
    (folder,) = tmp_path.iterdir()
    with pytest.raises(UserError, match="not complete"):
        features.open_store(folder, LAYERS)
    features.build(target, CORPUS, LAYERS, CONFIG, Said(), tmp_path)
    assert len(target.passes) == len(chunks(CORPUS, CONFIG.batch_tokens)) - 3
    built, whole = columns(folder), columns(finished)
    assert len(built) == 2 + len(LAYERS) and all(whole[name] == data for name, data in built.items())


def test_two_processes_at_once_build_once(child, target, tmp_path):
    waiting, stores = str(tmp_path / "waiting"), tmp_path / "stores"
    first = child(stores, WORK_UNTIL_ANOTHER_WAITS.format(waiting=waiting))
    while not list(stores.glob("*/journal.jsonl")):  # the first is at work
        assert first.poll() is None
        time.sleep(0.05)
    second = child(stores, TELL_WHEN_WAITING.format(waiting=waiting))
    passes = [int(process.communicate(timeout=300)[0]) for process in (first, second)]
    assert passes == [len(chunks(CORPUS, CONFIG.batch_tokens)), 0]
    (folder,) = stores.iterdir()
    assert features.build(target, CORPUS, LAYERS, CONFIG, Said(), stores) == folder and target.passes == []


@pytest.mark.parametrize("name", ["ids", "supervised", "layer_001", "last"])
def test_a_flipped_bit_is_refused_in_training_and_rebuilt_by_a_build(store, target, name):
    before = columns(store)
    flip(store / f"{name}.bin", len(before[f"{name}.bin"]) // 2)
    damaged = features.open_store(store, LAYERS, last_hidden=True)
    with pytest.raises(UserError, match=f"{name}.bin is damaged"):
        damaged.batch(range(len(CORPUS.rows)))
    said = Said()
    rebuild(store, target, said)
    assert len(target.passes) == 1 and columns(store) == before
    assert any("1 damaged chunk" in line for line in said)
    assert features.open_store(store, LAYERS, last_hidden=True).batch(range(len(CORPUS.rows)))


@pytest.mark.parametrize("left", [0, 1000, None], ids=["empty", "shortened", "gone"])
def test_a_shortened_or_lost_file_is_refused_and_rebuilt(store, target, left):
    before = columns(store)
    path = store / "layer_002.bin"
    path.unlink() if left is None else os.truncate(path, left)
    with pytest.raises(UserError, match="layer_002.bin is not complete"):
        features.open_store(store, (2,))
    features.open_store(store, (0, 1)).batch([0])  # the others are as good as ever
    rebuild(store, target)
    assert set(target.passes) == {((2,), False)} and columns(store) == before


@pytest.mark.parametrize("damage", ["flipped", "half-written"])
def test_a_damaged_journal_line_costs_its_chunk_and_no_more(store, target, damage):
    before, journal = columns(store), store / "journal.jsonl"
    flip(journal, 5) if damage == "flipped" else os.truncate(journal, journal.stat().st_size - 5)
    with pytest.raises(UserError, match="not complete"):
        features.open_store(store, LAYERS)
    rebuild(store, target)
    rebuild(store, target)
    assert len(target.passes) == 1 and columns(store) == before
    assert features.open_store(store, LAYERS, last_hidden=True).batch(range(len(CORPUS.rows)))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}'])
def test_an_unreadable_description_is_written_again(store, target, text):
    (store / "meta.json").write_text(text)
    with pytest.raises(UserError, match="expected a feature store"):
        features.open_store(store, LAYERS)
    rebuild(store, target)
    assert target.passes == []  # the checksums still vouch for the columns
    features.open_store(store, LAYERS)


# ---- refusals


def test_too_little_disk_is_refused_before_any_work(target, tmp_path, monkeypatch):
    needed = features.estimate_bytes(TOKENS, (1,), target.hidden_size)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed - 1))
    with pytest.raises(UserError, match="free"):
        features.build(target, CORPUS, (1,), CONFIG, Said(), tmp_path)
    assert target.passes == []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed))
    folder = features.build(target, CORPUS, (1,), CONFIG, Said(), tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
    assert features.build(target, CORPUS, (1,), CONFIG, Said(), tmp_path) == folder  # nothing to do needs no room


def test_a_folder_that_cannot_be_made_is_one_line(target, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="can't be written"):
        features.build(target, CORPUS, (1,), CONFIG, Said(), tmp_path / "file")


@pytest.mark.parametrize("layer_ids", [(), (1, 1), (3,), (-1,), (7,)])
def test_bad_layers_are_refused(target, tmp_path, layer_ids):
    with pytest.raises(UserError):
        features.build(target, CORPUS, layer_ids, CONFIG, Said(), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_layer_that_was_not_built_is_refused(target, tmp_path):
    folder = features.build(target, CORPUS, (1,), CONFIG, Said(), tmp_path)
    with pytest.raises(UserError, match="layer_002.bin is not complete"):
        features.open_store(folder, (1, 2))
    with pytest.raises(UserError, match="last.bin is not complete"):
        features.open_store(folder, (1,), last_hidden=True)


def test_a_folder_without_a_store_or_with_another_format_is_refused(store, tmp_path):
    with pytest.raises(UserError, match="expected a feature store"):
        features.open_store(tmp_path / "nowhere", (1,))
    meta = json.loads((store / "meta.json").read_text())
    (store / "meta.json").write_text(json.dumps(meta | {"format": features.FORMAT + 1}))
    with pytest.raises(UserError, match="expected a feature store"):
        features.open_store(store, (1,))


def test_progress_names_the_rate_and_the_time_left(target, tmp_path, monkeypatch):
    monkeypatch.setattr(features, "SAY_EVERY", 0.0)
    said = Said()
    features.build(target, CORPUS, (1,), CONFIG, said, tmp_path)
    assert sum("tokens/s" in line for line in said) == len(target.passes)
    assert "s left" in said[2] and "100%" in said[-1]
