"""Prompts: every known form of a row, named sets, and what is refused with its line."""

import gzip
import json

import pytest

from draftlab import prompts
from draftlab.config import EvalConfig, Run, TargetConfig
from draftlab.errors import UserError
from draftlab.prompts import load_prompts, read_prompts
from draftlab.target import load_target


def quiet(*_, **__):
    """No progress."""


@pytest.fixture(scope="module")
def target():
    return load_target(TargetConfig(model="tiny", dtype="float32", device="cpu"))


def save(path, rows):
    path.write_text("".join(json.dumps(row) + "\n\n" for row in rows), encoding="utf-8")
    return str(path)


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def system(text):
    return {"role": "system", "content": text}


@pytest.mark.parametrize(
    "row, turns",
    [
        ({"prompt": "a"}, ("a",)),
        ({"question": "a", "answer": "b"}, ("a",)),
        ({"instruction": "a", "messages": None}, ("a",)),
        ({"turns": ["a", "c"]}, ("a", "c")),
        ({"messages": [user("a")]}, ("a",)),
        ({"messages": [user("a"), assistant("b"), user("c"), assistant("d")]}, ("a", "c")),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, ("a",)),
        ({"conversations": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, ("a",)),
        ({"conversations": [{"from": "user", "content": "a"}, {"role": "gpt", "value": "b"}]}, ("a",)),
    ],
)
def test_every_usual_kind_of_row_is_read(target, tmp_path, row, turns):
    (prompt,) = load_prompts(save(tmp_path / "p.jsonl", [row]), Run(), target, quiet)
    assert prompt.turns == turns and prompt.system is None and prompt.domain == "p"
    assert read_prompts(str(tmp_path / "p.jsonl"), 5)[0].turns == turns


def test_a_system_prompt_is_kept_and_another_is_only_for_those_without(target, tmp_path):
    rows = [{"messages": [system("be brief"), user("a")]}, {"prompt": "a"}, {"messages": [system(""), user("a")]}]
    own, none, empty = load_prompts(save(tmp_path / "p.jsonl", rows), Run(), target, quiet)
    assert own.messages(system="be long") == [system("be brief"), user("a")]
    assert none.messages(system="be long") == empty.messages(system="be long") == [system("be long"), user("a")]
    assert none.messages() == [user("a")]


def test_a_turn_follows_the_answers_to_those_before_it():
    prompt = prompts.Prompt("chat", "here", ("a", "c", "e"), "s")
    assert prompt.messages() == [system("s"), user("a")]
    assert prompt.messages(["b", "d"]) == [system("s"), user("a"), assistant("b"), user("c"), assistant("d"), user("e")]
    assert prompt.questions() == [system("s"), user("a"), user("c"), user("e")]


def test_several_sets_are_read_at_once_each_with_its_name(target, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    save(tmp_path / "chat.jsonl", [{"prompt": f"chat {i}"} for i in range(10)])
    with gzip.open(tmp_path / "code.jsonl.gz", "wt") as file:
        file.write('{"prompt": "code"}\n')
    found = load_prompts("humaneval:2, ~/chat.jsonl:5,~/code.jsonl.gz", Run(), target, quiet)
    assert [prompt.domain for prompt in found] == ["humaneval"] * 2 + ["chat"] * 5 + ["code"]
    assert [prompt.turns[0] for prompt in found[2:7]] == [f"chat {i}" for i in (0, 2, 4, 6, 8)]
    assert found[3].where == "prompts ~/chat.jsonl, line 5"  # a blank line after each


def test_humaneval_has_164_prompts_and_a_part_of_it_is_spread_evenly(target):
    every = load_prompts("humaneval:1000", Run(), target, quiet)
    some = load_prompts("humaneval:4", Run(), target, quiet)
    assert len(every) == 164 and some == [every[i] for i in (0, 41, 82, 123)]
    assert len(load_prompts("humaneval", Run(), target, quiet)) == EvalConfig().prompts
    assert "has_close_elements" in every[0].turns[0]


@pytest.mark.parametrize(
    "name, row, turns",
    [
        ("gsm8k", {"question": "1 + {x}?"},
         ["1 + {x}?\nPlease reason step by step, and put your final answer within \\boxed{}."]),
        ("mt-bench", {"prompt": ["a", "b"], "category": "writing"}, ["a", "b"]),
        ("alpaca", {"instruction": "a", "input": "b"}, ["a\n\nInput:\nb"]),
        ("alpaca", {"instruction": "a", "input": ""}, ["a"]),
    ],
)  # fmt: skip
def test_a_published_set_is_asked_as_the_authors_ask_it(target, monkeypatch, name, row, turns):
    import datasets

    def fetched(dataset, config, *, split, streaming):
        assert (dataset, config, split) == prompts.SETS[name][:3]
        return iter([row])

    monkeypatch.setattr(datasets, "load_dataset", fetched)
    (prompt,) = load_prompts(name, Run(), target, quiet)
    assert list(prompt.turns) == turns and prompt.domain == name


def test_a_hub_that_cannot_be_reached_is_one_line(target, monkeypatch):
    import datasets

    def offline(*_, **__):
        raise ConnectionError("Couldn't reach the hub\nand more")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    words = r"^prompts gsm8k: not fetched from the Hugging Face hub as openai/gsm8k \(Couldn't reach the hub\)$"
    with pytest.raises(UserError, match=words):
        load_prompts("gsm8k", Run(), target, quiet)


@pytest.mark.parametrize(
    "text, words",
    [
        ('{"prompt": "fine"}\n{"prompt": 3}', "line 2: message 1 has no text, got 3"),
        ('{"prompt": "fine"}\n\n{"text": "a"}', 'line 3: expected "turns", .* got \'text\''),
        ("{}", "line 1: expected .* got no key"),
        ("[1]", "line 1: expected a JSON object, got list"),
        ("{broken", "line 1: not valid JSON"),
        ('{"messages": []}', "line 1: expected at least one turn of a user"),
        ('{"turns": []}', "line 1: expected at least one turn of a user"),
        ('{"turns": ["a", " "]}', "line 1: message 2 has no text"),
        ('{"turns": ["a", null]}', "line 1: message 2 has no text"),
        ('{"prompt": "a"}\n{"prompt": "b \\ud800"}', "line 2: message 1 holds half a surrogate pair"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "line 1: the conversation starts with the assistant"),
        ('{"conversations": [{"from": "gpt", "value": "x"}, {"from": "human", "value": "y"}]}', ".* starts with"),
        (json.dumps({"messages": [user("a"), assistant("b"), user("c")]}), "line 1: the conversation ends with a user"),
        (json.dumps({"messages": [user("a"), user("b"), assistant("c")]}), "line 1: expected user and assistant"),
        (json.dumps({"messages": [user("a"), {"role": "tool", "content": "b"}]}), "by turns, got user, tool"),
        ('{"messages": ["a"]}', "line 1: expected messages of .* got 'a'"),
        ('{"conversations": [{"from": "human"}]}', "line 1: expected messages of .*"),
        ('{"conversations": [{"from": ["human"], "value": "a"}]}', "line 1: expected user and assistant"),
        ("", "at least one, got none"),
    ],
)
def test_a_broken_prompts_file_is_refused_with_the_line(target, tmp_path, text, words):
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=words) as caught:
        load_prompts(str(path), Run(), target, quiet)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "spec, words",
    [
        ("nowhere.jsonl", "prompts nowhere.jsonl: can't be read"),
        ("nothing", "prompts nothing: no such file; expected .* humaneval, gsm8k"),
        ("humaneval:0", "prompts humaneval:0: expected at least one"),
        ("humaneval:1,", "prompts : no such file"),
        ("humaneval:1,humaneval:2", "humaneval stands there twice"),
    ],
)
def test_prompts_that_are_not_there_are_refused(target, spec, words):
    with pytest.raises(UserError, match=words):
        load_prompts(spec, Run(), target, quiet)


def test_as_many_rows_are_read_as_are_asked_for(tmp_path):
    path = save(tmp_path / "p.jsonl", [{"prompt": "a"}, {"prompt": "b"}, {}])
    assert [prompt.turns for prompt in read_prompts(path, 2)] == [("a",), ("b",)]
    with pytest.raises(UserError, match="line 5: expected"):
        read_prompts(path, 3)


def test_an_instruction_keeps_its_input():
    assert prompts.from_row({"instruction": "Shorten:", "input": "a b"}, "d", "w").turns == ("Shorten:\n\nInput:\na b",)
    assert prompts.from_row({"instruction": "Sing.", "input": ""}, "d", "w").turns == ("Sing.",)
