"""Conversations whose assistant turns were written by the target, as tokens with a mask of what was written.

A draft learns to guess what its target would say, so the target says it: prompts come from a file, or from the target
itself, which continues an empty user turn. A corpus file has a JSON row a line:

    {"messages": [{"role", "content"}, ...], "ids": [...], "supervised": [[start, end], ...], "finished": bool}

`ids` and `supervised` (half-open spans of tokens that the assistant wrote) may be missing: the chat template makes
them.
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import json
import os
import re
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
import yaml
from torch import Tensor

from draftlab.cache import KVCache, packed
from draftlab.config import CorpusConfig, digest
from draftlab.errors import UserError
from draftlab.target import Target, cache_root, expand, made_once

PACKAGED = Path(__file__).resolve().parent / "data" / "smollm2_self.jsonl.gz"
"""Written by the packaged target with experiments/build_corpus.py; the recipe is in the .yaml beside it."""

PROMPT_WORDS, PROMPT_CHARACTERS = 4, 12
"""A shorter self-written prompt asks for nothing; characters count where words aren't spaced."""

Say = Callable[..., None]
Message = dict  # {"role": str, "content": str}


@dataclass(frozen=True)
class Row:
    """One conversation.

    Attributes:
        ids: (S,) int32.
        supervised: (S,) bool, tokens that the assistant wrote, its end-of-turn token included when it wrote one.
        messages: of {"role", "content"}.
        key: hash of the first prompt, by which the corpus is split.
    """

    ids: np.ndarray
    supervised: np.ndarray
    messages: tuple[Message, ...]
    key: str


@dataclass(frozen=True)
class Corpus:
    """Conversations, split so that no prompt is on both sides.

    Attributes:
        rows: all of them.
        train: indices into rows.
        heldout: the other indices.
        fingerprint: hash of every token and of the supervision.
        source: where it came from.
    """

    rows: list[Row]
    train: list[int]
    heldout: list[int]
    fingerprint: str
    source: str

    def prompts(self, count: int) -> list[list[Message]]:
        """The first `count` distinct held-out prompts by hash (fewer where there are fewer), ready for an answer."""
        first = {self.rows[i].key: self.rows[i] for i in reversed(self.heldout)}
        return [_prompt(first[key].messages) for key in sorted(first)[:count]]


def load_corpus(config: CorpusConfig, target: Target, say: Say) -> Corpus:
    """Read the corpus that a run names, or have the target write it.

    Rows are cut to max_length tokens; a row without a supervised token left is dropped, and the number said.

    Args:
        config: source, size, split.
        target: whose tokens and words these are.
        say: where to tell about progress.

    Raises:
        UserError: max_length beyond the target's positions, no such file, a broken line (named), an empty corpus, one
            without supervised tokens, or one that another target wrote.
    """
    if config.max_length > target.max_positions:
        raise UserError(
            f"corpus.max_length: expected at most the target's {target.max_positions} positions, "
            f"got {config.max_length}"
        )
    path = _source(config, target, say)
    rows, unsupervised = [], 0
    for number, data in read_lines(path, "corpus"):
        row = _row(data, f"{path}, line {number}", target, config.max_length, check=number <= 16)
        if row.supervised.any():
            rows.append(row)
        else:
            unsupervised += 1
    if not rows:
        if not unsupervised:
            raise UserError(f"corpus {path}: it has no rows")
        raise UserError(
            f"corpus {path}: none of its {unsupervised} rows has a token written by the assistant "
            f"within corpus.max_length={config.max_length}"
        )
    if unsupervised:
        say(f"corpus: {unsupervised} rows without a supervised token in the first {config.max_length} were dropped")
    rows, train, heldout = _split(rows, config)
    if not train or not heldout:
        raise UserError(f"corpus {path}: expected at least two different prompts, one of them to hold out")
    corpus = Corpus(rows, train, heldout, _fingerprint(rows), config.source)
    say(
        f"corpus: {len(rows)} conversations ({len(train)} to train, {len(heldout)} held out), "
        f"{sum(len(r.ids) for r in rows):,} tokens, {sum(int(r.supervised.sum()) for r in rows):,} supervised"
    )
    return corpus


class Journal:
    """Batches of an interrupted writing, so that it goes on; made by `Journal.beside`.

    A file with a line a batch. It stands there under a hash of all that it depends on: so other settings, other prompts
    or another target find nothing, and nothing has to be compared.

    Attributes:
        found: key -> the new ids of each context of that batch, as `generate` made them before.
    """

    def __init__(self, file: BinaryIO | None = None) -> None:
        self._file = file
        self.found: dict[str, list[list[int]]] = {}
        for line in file.read().splitlines() if file else []:
            try:
                self.found |= json.loads(line)
            except (ValueError, TypeError):
                continue  # half-written: that batch is made again

    def keep(self, key: str, written: list[list[int]]) -> None:
        """Add a finished batch; threads may do so at once."""
        if self._file:  # the line break first: it ends a line that was left half-written
            self._file.write(b"\n" + json.dumps({key: written}).encode())

    @classmethod
    @contextmanager
    def beside(cls, path: Path, say: Say) -> Iterator[Journal]:
        """The journal of what is being written to `path`; it goes when the context ends well.

        Raises:
            UserError: another process is writing to the same place.
        """
        place = path.with_name(f"{path.name}.journal")
        with open(place, "a+b", buffering=0) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"corpus {path}: another process is writing it") from None
            file.seek(0)
            journal, done = cls(file), False
            if journal.found:
                say(f"corpus: going on after {len(journal.found)} finished batches in {place}")
            try:
                yield journal
                done = True
            finally:
                if done or not file.tell():
                    place.unlink()


def count_rows(config: CorpusConfig) -> int:
    """Conversations of a corpus, without reading them; of one that the target still has to write, those it will.

    Raises:
        UserError: there is no such file.
    """
    if config.source == "self":
        return config.write_conversations
    path = PACKAGED if config.source == "packaged" else expand(config.source)
    return sum(1 for _ in read_lines(path, "corpus"))


def write_corpus(
    target: Target,
    prompts: Iterable[list[Message]] | None,
    config: CorpusConfig,
    say: Say,
    journal: Journal | None = None,
) -> Iterator[dict]:
    """Have the target answer prompts, several at once, and yield the rows of a corpus file as they are done.

    Args:
        target: the writer.
        prompts: conversations; their user turns are answered one after another, the assistant turns in them are
            replaced. None lets the target write config.write_conversations prompts of its own.
        config: the write_* settings, and max_length, which a prompt has to leave room in.
        say: where to tell about progress.
        journal: keeps finished batches, and has those of an interrupted writing.

    Yields:
        JSON-able rows. Rows of one turn carry the very ids that the target wrote.

    Raises:
        UserError: sizes that leave no room for a response, own prompts that are too often unusable, or a conversation
            that the chat template refuses.
    """
    _check_room(target, config, config.write_prompt_tokens if prompts is None else 1)
    if prompts is None:
        prompts = list(_self_prompts(target, config, say, journal))
    talks = [_Talk(_opening(prompt), [m for m in prompt if m["role"] == "user"]) for prompt in prompts]
    depth = 0
    while talks := [talk for talk in talks if talk.rest]:
        longest = min(config.max_length - 1, target.max_positions - config.write_response_tokens)
        asking, going = [], []
        for talk in talks:
            if talk.ask(target, longest):
                asking.append(talk)
            elif depth:  # as far as it got
                yield talk.row()
        if len(asking) < len(talks):
            reason = f"more than {longest} tokens, or the chat template rewrites the turns before them"
            what = "conversations end before their next turn" if depth else "prompts were left out"
            say(f"corpus: {len(talks) - len(asking)} {what}: {reason}")
        written = generate(
            target,
            [talk.ids for talk in asking],
            config.write_response_tokens,
            temperature=config.write_temperature,
            batch=config.write_batch,
            seed=(config.write_seed, 1 + depth),
            say=say,
            what=f"corpus: {len(asking)} answers",
            journal=journal,
        )
        for place, ids in written:
            talk = asking[place]
            if talk.answer(target, ids) and talk.rest:
                going.append(talk)
            else:
                yield talk.row()
        talks, depth = going, depth + 1


def write_file(path: Path, rows: Iterable[dict], recipe: dict) -> int:
    """Write a corpus file and, beside it, its recipe (.yaml); both appear whole or not at all.

    Args:
        path: ends in .jsonl or .jsonl.gz.
        rows: as `write_corpus` yields them.
        recipe: what made it; counts are added here.

    Returns:
        Rows written.

    Raises:
        UserError: the place can't be written, or there is no row.
    """
    part = path.with_name(f".{path.name}.part")
    note = recipe_path(part)
    head = yaml.safe_dump(recipe, sort_keys=False)  # first of all: nothing may fail after hours of writing
    counts = {"conversations": 0, "tokens": 0, "supervised_tokens": 0, "unfinished": 0}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "wb") as raw:
            # mtime=0: the same rows make the same bytes
            file = gzip.GzipFile("", "wb", 9, raw, mtime=0) if path.suffix == ".gz" else raw
            for row in rows:
                file.write((json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n").encode())
                counts["conversations"] += 1
                counts["tokens"] += len(row.get("ids", ()))
                counts["supervised_tokens"] += sum(end - start for start, end in row.get("supervised", ()))
                counts["unfinished"] += not row["finished"]
            if file is not raw:
                file.close()
        if not counts["conversations"]:
            raise UserError(f"corpus {path}: not one conversation could be written; see what was left out above")
        note.write_text(head + yaml.safe_dump(counts, sort_keys=False), encoding="utf-8")
        os.replace(note, recipe_path(path))
        os.replace(part, path)
    except OSError as error:
        raise UserError(f"corpus {path}: can't be written ({error.strerror})") from error
    finally:
        part.unlink(missing_ok=True)
        note.unlink(missing_ok=True)
    return counts["conversations"]


def recipe_path(path: Path) -> Path:
    """Where the recipe of a corpus file stands."""
    return path.with_name(path.name.removesuffix(".gz").removesuffix(".jsonl") + ".yaml")


def recipe(target: Target, config: CorpusConfig) -> dict:
    """What makes a corpus again: the writer and its settings."""
    return {
        "target": {"name": target.name, "revision": target.revision, "fingerprint": target.fingerprint},
        "write": {key: value for key, value in config.model_dump().items() if key.startswith("write_")},
    }


def check_out(path: Path) -> None:
    """Refuse a name for a corpus file before hours are spent on its content.

    Raises:
        UserError: wrong ending, a corpus or a recipe that stands there already, or a folder that can't be written.
    """
    if not path.name.endswith((".jsonl", ".jsonl.gz")):
        raise UserError(f"--out {path}: expected a .jsonl or .jsonl.gz file")
    for there in (path, recipe_path(path)):
        if there.exists():
            raise UserError(f"--out {path}: {there} exists already, expected a new name")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {path}: can't be written ({error.strerror})") from error
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"--out {path}: can't be written")


# ---- reading


def encode(target: Target, messages: Sequence[Message], **template_kwargs) -> tuple[list[int], list[list[int]]]:
    """Tokens of a conversation by the chat template, and the spans of them that the assistant wrote.

    A span starts where the template would let the assistant write, and ends with the end-of-turn token.

    Raises:
        UserError: the template changes what it wrote before when a conversation goes on.
    """
    text = target.render(messages, tokenize=False, **template_kwargs)
    encoded = target.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
    spans = []
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = target.render(messages[:turn], tokenize=False, add_generation_prompt=True)
        after = target.render(messages[: turn + 1], tokenize=False)
        if not text.startswith(before):
            raise UserError(f"target {target.name}: its chat template rewrites earlier turns, expected one that adds")
        inside = [i for i, (start, end) in enumerate(offsets) if len(before) <= start < end <= len(after)]
        for place, i in enumerate(inside):
            if ids[i] in target.eos_token_ids:  # what follows it belongs to the template
                inside = inside[: place + 1]
                break
        if inside:
            spans.append([inside[0], inside[-1] + 1])
    return ids, spans


def _source(config: CorpusConfig, target: Target, say: Say) -> Path:
    if config.source == "packaged":
        if target.name != "smollm2":
            raise UserError(
                f"corpus.source: the packaged corpus was written by smollm2, the target is {target.name}; "
                "use corpus.source=self or a file"
            )
        return PACKAGED
    if config.source == "self":
        made_by = recipe(target, config) | {"max_length": config.max_length}

        place = cache_root() / "corpora" / f"self-{digest(made_by)}"

        def make(folder: Path) -> None:
            with Journal.beside(place, say) as journal:
                rows = write_corpus(target, None, config, say, journal)
                write_file(folder / "corpus.jsonl.gz", rows, made_by)

        return made_once(place, make) / "corpus.jsonl.gz"
    return expand(config.source)


def read_lines(path: Path, what: str) -> Iterator[tuple[int, dict]]:
    """(line number, row) of every line of a .jsonl or .jsonl.gz file that isn't blank.

    Args:
        what: the file, as errors name it.

    Raises:
        UserError: it can't be read, or a line (named) is no JSON object.
    """
    number = 0
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, _object(line, f"{what} {path}, line {number}")
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{what} {path}, line {number + 1}: can't be read ({error})") from error
    except OSError as error:
        raise UserError(f"{what} {path}: can't be read ({error.strerror or error})") from error


def _object(line: str, where: str) -> dict:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON ({getattr(error, 'msg', error)})") from error
    if not isinstance(row, dict):
        raise UserError(f"{where}: expected a JSON object, got {type(row).__name__}")
    return row


def _row(data: dict, where: str, target: Target, max_length: int, check: bool) -> Row:
    """A row of a corpus file, checked and cut; `check` also compares its words with its tokens (slow)."""
    messages = data.get("messages")
    if not isinstance(messages, list) or not messages or not all(_is_message(m) for m in messages):
        raise UserError(f'corpus {where}: expected "messages", a list of {{"role", "content"}}')
    if messages[0]["role"] == "assistant":
        raise UserError(f"corpus {where}: expected a conversation that a user or a system prompt begins")
    if "ids" in data:
        try:
            ids, spans = _integers(data["ids"], 1), _integers(data["supervised"], 2)
            wrong = any(not 0 <= start <= end <= len(ids) for start, end in spans)
        except (KeyError, TypeError, ValueError):
            wrong = True
        if wrong:
            raise UserError(f'corpus {where}: expected "ids", integers, and "supervised", [start, end] spans of them')
    else:
        try:
            ids, spans = encode(target, messages)
        except UserError as error:
            raise UserError(f"corpus {where}: {error}") from error
        ids = np.asarray(ids, dtype=np.int64)
    beyond = ids[(ids < 0) | (ids >= target.vocab_size)]
    if len(beyond):
        raise UserError(
            f"corpus {where}: token id {beyond[0]} is beyond the target's {target.vocab_size}; another target wrote it"
        )
    if check and "ids" in data and not _same_words(target, messages, ids, spans):
        raise UserError(f"corpus {where}: its tokens don't spell its messages; another target wrote it")
    supervised = np.zeros(len(ids), dtype=bool)
    for start, end in spans:
        supervised[start:end] = True
    return Row(ids[:max_length].astype(np.int32), supervised[:max_length], tuple(messages), _key(messages))


def _integers(values: object, ndim: int) -> np.ndarray:
    """A JSON list of integers, or of lists of them; anything else is a TypeError or a ValueError."""
    array = np.asarray(values)
    if not array.size:
        return np.zeros((0,) * ndim, dtype=np.int64)
    if array.dtype.kind != "i" or array.ndim != ndim:
        raise TypeError
    return array


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and all(is_text(message.get(key)) for key in ("role", "content"))


def is_text(value: object) -> bool:
    """A string without half a surrogate pair, which JSON may hold and no tokenizer takes."""
    return isinstance(value, str) and not re.search("[\ud800-\udfff]", value)


def _same_words(target: Target, messages: Sequence[Message], ids: np.ndarray, spans: Sequence[tuple[int, int]]) -> bool:
    """Whether the assistant's tokens spell the assistant's messages, but for what a template leaves out of the earlier
    ones, their reasoning."""
    answers = [m["content"].strip() for m in messages if m["role"] == "assistant"]
    spelled = [target.tokenizer.decode(ids[start:end], skip_special_tokens=True).strip() for start, end in spans]
    if len(answers) != len(spelled) or answers[-1:] != spelled[-1:]:
        return False
    return all(answer.endswith(own) and (own or not answer) for answer, own in zip(answers, spelled))


def _prompt(messages: Sequence[Message]) -> list[Message]:
    """The messages up to the first assistant turn."""
    prompt = []
    for message in messages:
        if message["role"] == "assistant":
            break
        prompt.append(message)
    return prompt


def _key(messages: Sequence[Message]) -> str:
    prompt = [(m["role"], m["content"]) for m in _prompt(messages)]
    return hashlib.sha256(json.dumps(prompt).encode()).hexdigest()


def _split(rows: list[Row], config: CorpusConfig) -> tuple[list[Row], list[int], list[int]]:
    """(rows in use, training indices, held-out indices): by hash of the prompt, so it stays as rows come and go."""
    keys = sorted({row.key for row in rows})
    heldout = {key for key in keys if int(key[:8], 16) / 16**8 < config.heldout}
    if len(keys) > 1:  # a few rows may all fall on one side
        heldout = heldout - {keys[-1]} or {keys[0]}
    if config.conversations is not None and config.conversations < len(rows):
        # From either side by hash; another hash than the split's, which would prefer one side.
        order = sorted(range(len(rows)), key=lambda i: (digest(rows[i].key), i))
        sides = [[i for i in order if rows[i].key in heldout], [i for i in order if rows[i].key not in heldout]]
        share = min(max(1, round(config.conversations * len(sides[0]) / len(rows))), max(1, config.conversations - 1))
        rows = [rows[i] for i in sorted(sides[0][:share] + sides[1][: config.conversations - share])]
    train = [i for i, row in enumerate(rows) if row.key not in heldout]
    return rows, train, [i for i, row in enumerate(rows) if row.key in heldout]


def _fingerprint(rows: Sequence[Row]) -> str:
    total = hashlib.sha256()
    for row in rows:
        total.update(len(row.ids).to_bytes(4, "little") + row.ids.tobytes() + row.supervised.tobytes())
    return total.hexdigest()[:12]


# ---- writing


@dataclass
class _Talk:
    """A conversation that is being written."""

    messages: list[Message]
    rest: list[Message]
    ids: list[int] = ()
    spans: list[list[int]] = ()
    finished: bool = True

    def ask(self, target: Target, longest: int) -> bool:
        """Go on with the next user turn; whether it fits, else the conversation stays as it is."""
        messages = [*self.messages, self.rest.pop(0)]
        try:
            ids, spans = encode(target, messages, add_generation_prompt=True)
        except UserError:
            if len(messages) == len(_opening(messages)) + 1:
                raise  # nobody's first turn can be rewritten: it is refused
            return False
        if len(ids) > longest:
            return False
        self.messages, self.ids, self.spans = messages, ids, spans
        return True

    def answer(self, target: Target, ids: list[int]) -> bool:
        """Take the target's answer; whether it ended its turn."""
        self.finished = bool(ids) and ids[-1] in target.eos_token_ids
        text = target.tokenizer.decode(ids, skip_special_tokens=True)
        self.messages.append({"role": "assistant", "content": text})
        self.spans = [*self.spans, [len(self.ids), len(self.ids) + len(ids)]]
        self.ids = [*self.ids, *ids]
        return self.finished

    def row(self) -> dict:
        return {"messages": self.messages, "ids": self.ids, "supervised": self.spans, "finished": self.finished}


def _opening(messages: Sequence[Message]) -> list[Message]:
    """What stands before the first user turn: a system prompt, or nothing."""
    first = next((i for i, m in enumerate(messages) if m["role"] == "user"), len(messages))
    return [m for m in messages[:first] if m["role"] != "assistant"]


def _check_room(target: Target, config: CorpusConfig, prompt: int) -> None:
    """Refuse sizes with which no prompt, or not every one of `prompt` tokens, could be answered."""
    template = len(target.chat([{"role": "user", "content": ""}]))
    if config.max_length < template + 2:
        raise UserError(
            f"corpus.max_length: expected at least {template + 2}, the chat template's {template} tokens and one each "
            f"of a prompt and a response, got {config.max_length}"
        )
    if template + prompt + config.write_response_tokens > target.max_positions:
        raise UserError(
            f"corpus.write_response_tokens: expected room in the target's {target.max_positions} positions for the "
            f"chat template ({template}), a prompt ({prompt}) and a response, got {config.write_response_tokens}"
        )


def _self_prompts(
    target: Target, config: CorpusConfig, say: Say, journal: Journal | None
) -> Iterator[list[Message]]:
    """Prompts of the target's own: it continues an empty user turn until it ends it.

    Raises:
        UserError: fewer than one in sixteen is usable.
    """
    blank = "\u2042"  # a sign that no template contains
    opened = target.render([{"role": "user", "content": blank}], tokenize=False).partition(blank)[0]
    context = target.tokenizer(opened, add_special_tokens=False)["input_ids"]
    wanted, tried, seen = config.write_conversations, 0, set()
    while len(seen) < wanted:
        if tried >= 16 * (wanted + config.write_batch):
            raise UserError(
                f"target {target.name}: only {len(seen)} of {tried} self-written prompts were usable, "
                f"corpus.write_conversations={wanted} were wanted; give prompts in a file"
            )
        missing = wanted - len(seen)
        share = (len(seen) + 1) / (tried + 1) if tried else 0.75
        count = -(-min(int(missing / share) + 1, 16 * wanted) // config.write_batch) * config.write_batch
        written = generate(
            target,
            [context] * count,
            config.write_prompt_tokens,
            temperature=config.write_prompt_temperature,
            batch=config.write_batch,
            seed=(config.write_seed, 0, tried),
            say=say,
            what=f"corpus: {count} prompts, {len(seen)} of {wanted} kept so far",
            journal=journal,
        )
        tried += count
        for _, ids in written:
            text = _usable(target, ids)
            if text is not None and text.casefold() not in seen and len(seen) < wanted:
                seen.add(text.casefold())
                yield [{"role": "user", "content": text}]


def _usable(target: Target, ids: list[int]) -> str | None:
    """A self-written prompt's text, or None: never ended, too short, broken characters, or a turn within the turn."""
    if not ids or ids[-1] not in target.eos_token_ids:
        return None
    text = target.tokenizer.decode(ids[:-1]).strip()
    special = any(token in text for token in target.tokenizer.all_special_tokens)
    words = len(text.split())
    short = len(text) < PROMPT_CHARACTERS if words == 1 else words < PROMPT_WORDS
    return None if short or special or "\ufffd" in text else text


def generate(
    target: Target,
    contexts: Sequence[list[int]],
    limit: int,
    *,
    temperature: float,
    batch: int,
    seed: tuple[int, ...],
    say: Say,
    what: str,
    journal: Journal | None = None,
) -> Iterator[tuple[int, list[int]]]:
    """Continue many contexts, a batch at a time, each until it ends or reaches the limit.

    On a CPU the batches run side by side, one a core: a step is many small operations, which gain little from being
    split, and lose a lot when a core is busy elsewhere.

    Args:
        target: the writer.
        contexts: token ids.
        limit: most new tokens of a context.
        temperature: 0 takes the likeliest token.
        batch: contexts in a batch; those of like length go together.
        seed: of the sampling; each batch has its own stream.
        say: where to tell about progress.
        what: what is being written.
        journal: batches that it has are not written again.

    Yields:
        (index of the context, its new ids, the ending token included), batch by batch, shortest contexts first.
    """
    order = sorted(range(len(contexts)), key=lambda i: (len(contexts[i]), i))
    parts = [order[at : at + batch] for at in range(0, len(order), batch)]
    threads = torch.get_num_threads()
    workers = min(threads, len(parts)) if target.device.type == "cpu" else 1
    journal = journal or Journal()
    rate = _Rate(say, what, steps=limit * len(parts))

    def run(number: int) -> list[tuple[int, list[int]]]:
        if workers > 1:
            torch.set_num_threads(1)
        part = [contexts[i] for i in parts[number]]
        key = digest([target.fingerprint, part, limit, temperature, *seed, number])
        written = journal.found.pop(key, None)
        if written is None:
            random = torch.Generator().manual_seed(int(digest([*seed, number])[:8], 16))
            written = _continue(target, part, limit, temperature, random, rate)
            journal.keep(key, written)
        else:
            rate.skip(limit)
        return list(zip(parts[number], written))

    with ThreadPoolExecutor(max(1, workers)) as pool:
        try:
            waiting = [pool.submit(run, number) for number in range(len(parts))]
            while waiting:
                yield from waiting.pop(0).result()
        finally:
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(threads)


@torch.inference_mode()
def _continue(
    target: Target,
    contexts: list[list[int]],
    limit: int,
    temperature: float,
    random: torch.Generator,
    rate: _Rate,
) -> list[list[int]]:
    """New ids of each context of one batch."""
    device, count = target.device, len(contexts)
    # One column more than the longest, so that every row is padded on the left: with a mask transformers folds the
    # query heads of a single token onto their key heads, which attends 3 to 4 times faster on a CPU.
    width = max(map(len, contexts)) + 1
    ids = torch.zeros(count, width, dtype=torch.long)
    mask = torch.ones(count, width + limit, dtype=torch.bool)
    for row, context in enumerate(contexts):
        ids[row, width - len(context) :] = torch.tensor(context)
        mask[row, : width - len(context)] = False
    ids, mask = ids.to(device), mask.to(device)
    positions = (mask[:, :width].cumsum(dim=1) - 1).clamp_(min=0)
    ends = torch.tensor(sorted(target.eos_token_ids), device=device)
    cache = KVCache(target.config, count, width + limit, dtype=target.dtype, device=device)
    written: list[list[int]] = [[] for _ in contexts]
    owner = torch.arange(count)  # whose text each row of the batch is
    ended = torch.zeros(count, dtype=torch.bool)
    for step in range(limit):
        hidden = target.extend(ids, cache, mask[:, : cache.length + ids.shape[1]], positions)[:, -1]
        tokens = _pick(target.ends.head.logits(hidden), temperature, random)
        going = (~ended).nonzero()[:, 0].tolist()
        for row, token in zip(going, tokens[going].tolist()):
            written[owner[row]].append(token)
        rate(tokens=len(going), steps=1)
        ended |= torch.isin(tokens, ends).cpu()
        if ended.all():
            rate(tokens=0, steps=limit - 1 - step)
            break
        ids, positions = tokens[:, None], positions[:, -1:] + 1
        if ended.sum() >= max(1, len(ended) // 8):  # finished rows leave an eighth of the batch at a time
            index = torch.tensor(packed((~ended).tolist()))
            cache.keep_rows(index)
            owner, ended = owner[index], ended[index]
            index = index.to(device)
            ids, mask, positions = ids[index], mask[index], positions[index]
    return written


def _pick(logits: Tensor, temperature: float, random: torch.Generator) -> Tensor:
    """One token of each row: (R, V) -> (R,)."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    sums = (logits.float() / temperature).softmax(dim=-1).cumsum(dim=-1)
    draws = torch.rand(len(logits), 1, generator=random).to(logits.device)
    return torch.searchsorted(sums, draws * sums[:, -1:], right=True)[:, 0].clamp_(max=logits.shape[1] - 1)


class _Rate:
    """Progress in decoding steps and tokens, from several threads, said every few seconds."""

    def __init__(self, say: Say, what: str, steps: int, every: float = 5.0) -> None:
        self.say, self.what, self.total, self.every = say, what, steps, every
        self.steps = self.tokens = 0
        self.lock = threading.Lock()
        self.start = self.said = time.monotonic()

    def __call__(self, tokens: int, steps: int) -> None:
        with self.lock:
            self.tokens, self.steps = self.tokens + tokens, self.steps + steps
            now = time.monotonic()
            if now - self.said < self.every and self.steps < self.total:
                return
            self.said, spent = now, max(now - self.start, 1e-9)
            minutes, seconds = divmod(round(spent * (self.total / self.steps - 1)), 60)
            text = f"{self.what}: {self.steps / self.total:.0%}, {self.tokens / spent:.0f} tokens/s"
            self.say(f"{text}, at most {minutes}:{seconds:02d} left", doing=text)

    def skip(self, steps: int) -> None:
        """There are fewer steps to take."""
        with self.lock:
            self.total -= steps
