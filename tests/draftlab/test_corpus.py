"""Writing and reading conversations: the writer against transformers' `generate`, the mask against the words."""

import gzip
import hashlib
import json

import numpy as np
import pytest
import torch
import yaml

from draftlab import corpus
from draftlab.config import CorpusConfig, TargetConfig
from draftlab.corpus import encode, generate, load_corpus, write_corpus, write_file
from draftlab.errors import UserError
from draftlab.prompts import read_prompts
from draftlab.target import load_target
from experiments import build_corpus


def quiet(text, doing=None):
    pass


@pytest.fixture(scope="module")
def tiny():
    return load_target(TargetConfig(model="tiny", dtype="float32"))


@pytest.fixture(scope="module")
def packaged():
    return load_target(TargetConfig(dtype="float32"))


@pytest.fixture
def threads():
    """Sets torch's threads, for the length of a test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def settings(**changes):
    """Tiny sizes; `heldout` is half so that a few rows are enough for both sides."""
    sizes = {"max_length": 96, "heldout": 0.5, "write_batch": 4, "write_prompt_tokens": 40, "write_response_tokens": 24}
    return CorpusConfig(**{**sizes, **changes})


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def talk(number, answer="four"):
    return {"messages": [user(f"question {number}"), assistant(answer)]}


def save(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def load(target, source, say=quiet, **changes):
    return load_corpus(settings(source=source, **changes), target, say)


# ---- the writer


def contexts_of(target, count):
    return [target.chat([user("why " * (1 + 7 * i % 9) + str(i))]) for i in range(count)]


def alone(target, context, limit):
    ids = torch.tensor([context])
    out = target.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, do_sample=False)
    return out[0, len(context) :].tolist()


@pytest.fixture(scope="module")
def answers(tiny):
    """Contexts, and what transformers' own `generate` makes of each."""
    contexts = contexts_of(tiny, 13)
    return contexts, [alone(tiny, context, 40) for context in contexts]


@pytest.mark.parametrize("batch, workers", [(1, 1), (5, 1), (16, 1), (5, 2)])
def test_greedy_writing_equals_transformers_generate_row_by_row(tiny, threads, answers, batch, workers):
    threads(workers)
    contexts, expected = answers
    got = dict(generate(tiny, contexts, 40, temperature=0, batch=batch, seed=(0,), say=quiet, what="x"))
    assert [got[i] for i in range(13)] == expected
    lengths = {len(ids) for ids in expected}
    assert len(lengths) > 3 and max(lengths) == 40  # rows left the batch one by one, some reached the limit
    assert torch.get_num_threads() == workers


def test_the_packaged_target_writes_what_generate_writes(packaged):
    contexts = [packaged.chat([user(text)]) for text in ("What is the capital of France?", "Name a colour.")]
    got = dict(generate(packaged, contexts, 10, temperature=0, batch=2, seed=(0,), say=quiet, what="x"))
    assert [got[0], got[1]] == [alone(packaged, context, 10) for context in contexts]
    assert packaged.tokenizer.decode(got[0]) == "The capital of France is Paris.<|im_end|>"


def test_sampling_follows_the_softmax_and_its_seed():
    logits = torch.tensor([[0.0, 1.0, -torch.inf, 2.0]]).repeat(20_000, 1)
    picked = corpus._pick(logits, 2.0, torch.Generator().manual_seed(1))
    share = torch.bincount(picked, minlength=4) / len(picked)
    torch.testing.assert_close(share, (logits[0] / 2.0).softmax(0), rtol=0, atol=0.015)  # 4 standard errors
    assert picked.equal(corpus._pick(logits, 2.0, torch.Generator().manual_seed(1)))
    assert not picked.equal(corpus._pick(logits, 2.0, torch.Generator().manual_seed(2)))


def test_what_is_sampled_depends_on_the_seed_and_not_on_the_threads(tiny, threads):
    contexts = contexts_of(tiny, 9)

    def write(seed):
        return dict(generate(tiny, contexts, 12, temperature=1.0, batch=4, seed=seed, say=quiet, what="x"))

    threads(1)
    first = write((0, 1))
    threads(3)
    assert write((0, 1)) == first
    assert write((0, 2)) != first


def test_the_target_writes_prompts_of_its_own_and_answers_them(tiny):
    config = settings(write_conversations=10, write_batch=16)
    rows = list(write_corpus(tiny, None, config, quiet))
    prompts = [row["messages"][0]["content"] for row in rows]
    assert len(rows) == len(set(prompts)) == 10
    assert all(len(prompt) >= corpus.PROMPT_CHARACTERS and "\ufffd" not in prompt for prompt in prompts)
    for row in rows:
        context = tiny.chat(row["messages"][:1])
        (span,) = row["supervised"]
        assert row["ids"][: len(context)] == context and span == [len(context), len(row["ids"])]
        assert row["ids"][len(context) :] == alone(tiny, context, config.write_response_tokens)
        assert row["finished"] == (row["ids"][-1] in tiny.eos_token_ids)
    assert list(write_corpus(tiny, None, config, quiet)) == rows
    other = write_corpus(tiny, None, config.model_copy(update={"write_seed": 1}), quiet)
    assert [row["messages"][0] for row in other] != [user(p) for p in prompts]


def test_a_target_that_writes_no_usable_prompt_is_given_up(tiny):
    with pytest.raises(UserError, match="only 0 of .* self-written prompts were usable"):
        list(write_corpus(tiny, None, settings(write_conversations=1, write_prompt_tokens=2), quiet))


def test_several_turns_are_answered_one_after_another_and_old_answers_replaced(tiny):
    config = settings(max_length=400, write_response_tokens=100)
    prompts = [[{"role": "system", "content": "S"}, user("one"), assistant("OLD"), user(f"two {i}")] for i in range(4)]
    rows = list(write_corpus(tiny, prompts, config, quiet))
    assert len(rows) == 4
    whole = [row for row in rows if len(row["messages"]) == 5]
    assert whole  # a conversation stops at an answer that reached the limit
    for row in whole:
        assert [m["role"] for m in row["messages"]] == ["system", "user", "assistant", "user", "assistant"]
        assert "OLD" not in json.dumps(row)
        for turn, (start, end) in zip((2, 4), row["supervised"]):
            assert row["ids"][:start] == tiny.chat(row["messages"][:turn])
            assert row["ids"][start:end] == alone(tiny, row["ids"][:start], 100)


def test_words_of_the_assistant_before_the_first_question_are_no_part_of_it(tiny):
    prompts = [[assistant("OLD"), user("one")], [{"role": "system", "content": "S"}, assistant("OLD"), user("two")]]
    rows = list(write_corpus(tiny, prompts, settings(), quiet))
    assert [[m["role"] for m in row["messages"]] for row in rows] == [
        ["user", "assistant"], ["system", "user", "assistant"],
    ]


def test_prompts_that_leave_no_room_are_left_out_and_counted(tiny):
    said = []
    prompts = [[user("short")], [user("long " * 40)]]
    rows = list(write_corpus(tiny, prompts, settings(), lambda text, doing=None: said.append(text)))
    assert [row["messages"][0]["content"] for row in rows] == ["short"]
    assert any("1 prompts were left out: more than 95 tokens" in text for text in said)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"write_response_tokens": 2048}, "corpus.write_response_tokens: .* 2048 positions .* got 2048"),
        ({"write_response_tokens": 1000, "write_prompt_tokens": 1100}, r"a prompt \(1100\) and a response, got 1000"),
        ({"max_length": 8}, "corpus.max_length: expected at least .* got 8"),
    ],
)
def test_sizes_without_room_for_a_response_are_refused_before_any_writing(tiny, monkeypatch, changes, message):
    monkeypatch.setattr(corpus, "generate", lambda *_, **__: pytest.fail("long work began"))
    with pytest.raises(UserError, match=message):
        next(write_corpus(tiny, None, settings(**changes), quiet))


def test_the_longest_response_that_the_target_has_positions_for_is_accepted(tiny):
    most = 2048 - len(tiny.chat([user("")])) - 1
    assert list(write_corpus(tiny, [], settings(write_response_tokens=most), quiet)) == []
    with pytest.raises(UserError, match=f"got {most + 1}"):
        list(write_corpus(tiny, [], settings(write_response_tokens=most + 1), quiet))


def test_a_length_beyond_the_targets_positions_is_refused_before_the_corpus_is_read(tiny):
    with pytest.raises(UserError, match="corpus.max_length: expected at most the target's 2048 positions, got 2049"):
        load(tiny, "/no/such/file.jsonl", max_length=2049)


# ---- tokens and mask


def test_the_mask_covers_the_assistants_words_and_its_end_of_turn(tiny):
    messages = [user("what is 2+2?"), assistant("four"), user("and 3+3?"), assistant("it is six")]
    ids, spans = encode(tiny, messages)
    assert ids == tiny.render(messages)
    assert [tiny.tokenizer.decode(ids[a:b]) for a, b in spans] == ["four<|im_end|>", "it is six<|im_end|>"]


def test_the_mask_of_the_packaged_template_covers_the_same(packaged):
    messages = [user("Hello!"), assistant("Héllo — 你好\n"), user("Bye"), assistant("  Bye.")]
    ids, spans = encode(packaged, messages)
    assert ids == packaged.render(messages)
    # The second answer's first space shares a token with the template's line break: not the assistant's alone.
    assert [packaged.tokenizer.decode(ids[a:b]) for a, b in spans] == ["Héllo — 你好\n<|im_end|>", " Bye.<|im_end|>"]


def test_a_template_that_rewrites_what_was_said_is_refused(tiny, monkeypatch):
    template = "{% for m in messages %}{{ messages|length ~ m['role'] ~ m['content'] }}{% endfor %}"
    monkeypatch.setattr(tiny.tokenizer, "chat_template", template)
    with pytest.raises(UserError, match="rewrites earlier turns"):
        encode(tiny, [user("a"), assistant("b"), user("c"), assistant("d")])


FORGETS = """{%- for m in messages -%}
{{ '<|im_start|>' + m['role'] + '\n' }}
{{- m['content'][3:] if m['role'] == 'assistant' and not loop.last else m['content'] }}{{ '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' + opening }}{%- endif -%}"""
"""As templates of models that think: of earlier answers the reasoning (here three characters) is left out."""


def test_a_template_that_leaves_out_earlier_reasoning_writes_a_corpus_that_it_reads(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(tiny.tokenizer, "chat_template", FORGETS.replace("opening", "''"))
    config = settings(max_length=400, write_response_tokens=100)
    prompts = [[user(f"one {i}"), user("two")] for i in range(6)]
    rows = list(write_corpus(tiny, prompts, config, quiet))
    whole = [row for row in rows if len(row["messages"]) == 4]
    assert whole
    for row in whole:
        said, spelled = row["messages"][1]["content"], tiny.tokenizer.decode(row["ids"][slice(*row["supervised"][0])])
        assert spelled.removesuffix("<|im_end|>").strip() == said[3:].strip()
    assert len(load(tiny, save(tmp_path / "talks.jsonl", rows), max_length=400).rows) == len(rows)
    whole[0]["messages"][1]["content"] = "Something else."
    with pytest.raises(UserError, match="line 1: its tokens don't spell its messages"):
        load(tiny, save(tmp_path / "wrong.jsonl", whole), max_length=400)


def test_a_conversation_ends_where_the_template_would_rewrite_it(tiny, tmp_path, monkeypatch):
    """The template opens every answer with a word of its own, which it leaves out when the conversation goes on."""
    monkeypatch.setattr(tiny.tokenizer, "chat_template", FORGETS.replace("opening", "'<think>\n'"))
    config, said = settings(max_length=400, write_response_tokens=100), []
    prompts = [[user(f"one {i}"), user("two")] for i in range(6)] + [[user("three")]]
    rows = list(write_corpus(tiny, prompts, config, lambda text, doing=None: said.append(text)))
    assert sorted(row["messages"][0]["content"] for row in rows) == [*(f"one {i}" for i in range(6)), "three"]
    assert all([m["role"] for m in row["messages"]] == ["user", "assistant"] for row in rows)
    ended = sum(row["finished"] and row["messages"][0]["content"] != "three" for row in rows)
    assert ended and any(f"{ended} conversations end before" in text and "rewrites" in text for text in said)


def test_rows_with_and_without_ids_read_the_same(tiny, tmp_path):
    rows = list(write_corpus(tiny, [[user(f"hi {i}")] for i in range(8)], settings(), quiet))
    rows = [row for row in rows if row["finished"]]
    assert len(rows) >= 2
    with_ids = load(tiny, save(tmp_path / "a.jsonl", rows))
    without = load(tiny, save(tmp_path / "b.jsonl", [{"messages": row["messages"]} for row in rows]))
    for one, other in zip(with_ids.rows, without.rows):
        length = len(one.ids)  # a rendered row goes on with the template's line break
        assert other.ids[:length].tolist() == one.ids.tolist()
        assert other.supervised[:length].tolist() == one.supervised.tolist() and not other.supervised[length:].any()
        assert one.ids.dtype == np.int32 and one.supervised.dtype == bool


def test_rows_are_cut_and_those_left_without_supervision_are_dropped_and_counted(tiny, tmp_path):
    said = []
    rows = [talk(1, "x" * 200), talk(2), talk(3), {"messages": [user("y" * 200), assistant("z")]}]
    path = save(tmp_path / "c.jsonl", rows)
    read = load(tiny, path, say=lambda text, doing=None: said.append(text), max_length=64)
    assert len(read.rows) == 3 and max(len(row.ids) for row in read.rows) == 64
    assert read.rows[0].supervised[-1]  # cut in the middle of an answer
    assert sum("1 rows without a supervised token" in text for text in said) == 1


def test_a_whole_conversation_only_differs_from_a_cut_one_by_the_end(tiny, tmp_path):
    path = save(tmp_path / "c.jsonl", [talk(i, "abc " * 10) for i in range(4)])
    whole, cut = load(tiny, path), load(tiny, path, max_length=50)
    assert [row.ids[:50].tolist() for row in whole.rows] == [row.ids.tolist() for row in cut.rows]
    assert whole.fingerprint != cut.fingerprint


# ---- the split


def sides(read):
    return tuple({read.rows[i].messages[0]["content"] for i in side} for side in (read.train, read.heldout))


def test_no_prompt_is_on_both_sides_even_when_it_comes_twice(tiny, tmp_path):
    rows = [talk(i % 20, f"answer {i}") for i in range(60)]
    read = load(tiny, save(tmp_path / "c.jsonl", rows))
    train, heldout = sides(read)
    assert train and heldout and not train & heldout
    assert sorted(read.train + read.heldout) == list(range(60))


def test_a_prompt_stays_on_its_side_when_rows_come_go_or_move(tiny, tmp_path):
    rows = [talk(i) for i in range(40)]
    train, heldout = sides(load(tiny, save(tmp_path / "a.jsonl", rows)))
    more = rows[::-1] + [talk(i) for i in range(40, 80)]
    moved_train, moved_heldout = sides(load(tiny, save(tmp_path / "b.jsonl", more)))
    assert train < moved_train and heldout < moved_heldout


def test_a_system_prompt_makes_another_prompt(tiny, tmp_path):
    rows = [talk(1), {"messages": [{"role": "system", "content": "be brief"}, *talk(1)["messages"]]}]
    read = load(tiny, save(tmp_path / "c.jsonl", rows))
    assert read.rows[0].key != read.rows[1].key


def test_two_prompts_are_enough_and_one_is_not(tiny, tmp_path):
    for heldout in (0.01, 0.99):
        read = load(tiny, save(tmp_path / "a.jsonl", [talk(1), talk(2)]), heldout=heldout)
        assert len(read.train) == len(read.heldout) == 1
    with pytest.raises(UserError, match="at least two different prompts"):
        load(tiny, save(tmp_path / "b.jsonl", [talk(1), talk(1, "other")]))


@pytest.mark.parametrize("count", [2, 10, 31])
def test_fewer_conversations_are_a_nested_choice_with_the_same_share_held_out(tiny, tmp_path, count):
    path = save(tmp_path / "c.jsonl", [talk(i) for i in range(60)])
    whole, some, more = (load(tiny, path, heldout=0.3, conversations=n) for n in (None, count, count + 20))
    assert len(some.rows) == count
    for part, bigger, all_of_it in zip(sides(some), sides(more), sides(whole)):
        assert part <= bigger <= all_of_it
    assert abs(len(some.heldout) - count * len(whole.heldout) / 60) <= 1


def test_heldout_prompts_are_distinct_always_the_same_and_end_before_the_answer(tiny, tmp_path):
    rows = [{"messages": [*talk(i % 10)["messages"], user("more"), assistant("no")]} for i in range(30)]
    read = load(tiny, save(tmp_path / "c.jsonl", rows))
    prompts = read.prompts(100)
    heldout = sides(read)[1]
    assert {p[0]["content"] for p in prompts} == heldout and len(prompts) == len(heldout)
    assert all([m["role"] for m in p] == ["user"] for p in prompts)
    again = load(tiny, save(tmp_path / "d.jsonl", rows[::-1]))
    assert again.prompts(100) == prompts and again.prompts(2) == prompts[:2]


def test_the_fingerprint_follows_the_tokens(tiny, tmp_path):
    path = save(tmp_path / "c.jsonl", [talk(1), talk(2)])
    first = load(tiny, path).fingerprint
    assert load(tiny, path).fingerprint == first
    assert load(tiny, save(tmp_path / "d.jsonl", [talk(1), talk(2, "five")])).fingerprint != first


# ---- what is refused


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"messages": [', "line 2: not valid JSON"),
        ("[1]", "line 2: expected a JSON object, got list"),
        ('{"text": "hello"}', 'line 2: expected "messages"'),
        ('{"messages": [{"role": "user"}]}', 'line 2: expected "messages"'),
        (json.dumps({**talk(1), "ids": [1, 2], "supervised": [[0, 3]]}), 'line 2: expected "ids"'),
        (json.dumps({**talk(1), "ids": ["a"], "supervised": []}), 'line 2: expected "ids"'),
        (json.dumps({**talk(1), "ids": [1]}), 'line 2: expected "ids"'),
        (json.dumps({**talk(1), "ids": [1, 300], "supervised": [[0, 1]]}), "line 2: token id 300 is beyond .* 300;"),
        (json.dumps({**talk(1), "ids": [-1, 2], "supervised": [[0, 1]]}), "line 2: token id -1 is beyond .* 300;"),
        (json.dumps({**talk(1), "ids": [65, 66], "supervised": [[0, 1]]}), "line 2: its tokens don't spell"),
        (json.dumps({"messages": [assistant("hi"), *talk(1)["messages"]]}), "line 2: expected a conversation"),
        (json.dumps({"messages": [user("half a pair \ud800"), assistant("b")]}), 'line 2: expected "messages"'),
        ("[" * 9999, "line 2: not valid JSON"),
        ('{"messages": ' + "1" * 5000 + "}", "line 2: not valid JSON"),
    ],
)
def test_a_broken_line_is_named(tiny, tmp_path, line, message):
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps(talk(0)) + "\n" + line + "\n", encoding="utf-8")
    with pytest.raises(UserError, match=message) as caught:
        load(tiny, str(path))
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"ids": [65.5, 66]}, {"ids": ["65", "66"]}, {"ids": [True, False]}, {"ids": [[65, 66]]}, {"ids": 65},
        {"supervised": [[0.5, 1.5]]}, {"supervised": ["01"]}, {"supervised": [0, 1]}, {"supervised": [True, False]},
    ],
)
def test_tokens_that_are_no_integers_are_refused_wherever_they_stand(tiny, tmp_path, wrong):
    rows = [talk(i) for i in range(20)] + [{**talk(20), "ids": [65, 66], "supervised": [[0, 1]], **wrong}]
    with pytest.raises(UserError, match='line 21: expected "ids", integers'):
        load(tiny, save(tmp_path / "c.jsonl", rows))


@pytest.mark.parametrize(
    "rows, message",
    [
        ([], "it has no rows"),
        ([{"messages": [user("a")]}, {"messages": [user("b")]}], "none of its 2 rows has a token written by"),
        ([{"messages": [user("a" * 200), assistant("b")]}], "none of its 1 rows .* corpus.max_length=96"),
    ],
)
def test_a_corpus_with_nothing_to_learn_from_is_refused(tiny, tmp_path, rows, message):
    with pytest.raises(UserError, match=message):
        load(tiny, save(tmp_path / "c.jsonl", rows))


def test_a_file_that_is_not_there_or_cut_short_is_one_clear_line(tiny, tmp_path):
    for path, message in ((str(tmp_path / "none.jsonl"), "No such file"), ("~nobody-at-all/c.jsonl", "user's home")):
        with pytest.raises(UserError, match=message):
            load(tiny, path)
        with pytest.raises(UserError, match=message):
            read_prompts(path, 1)
    whole = gzip.compress(b"\n".join(json.dumps(talk(i)).encode() for i in range(200)))
    (tmp_path / "half.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="half.jsonl.gz, line .*can't be read"):
        load(tiny, str(tmp_path / "half.jsonl.gz"))


@pytest.mark.parametrize("at", range(20, 400, 20))
def test_a_compressed_file_with_a_damaged_byte_is_one_clear_line(tiny, tmp_path, at):
    random = np.random.default_rng(0)
    rows = [talk(i, str(random.integers(10**9))) for i in range(100)]
    data = bytearray(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    data[at] ^= 0xFF
    (tmp_path / "c.jsonl.gz").write_bytes(data)
    with pytest.raises(UserError, match="c.jsonl.gz, line"):
        load(tiny, str(tmp_path / "c.jsonl.gz"))


def test_a_file_may_begin_with_a_byte_order_mark(tiny, tmp_path):
    plain = save(tmp_path / "a.jsonl", [talk(i) for i in range(4)])
    (tmp_path / "b.jsonl").write_text((tmp_path / "a.jsonl").read_text(), encoding="utf-8-sig")
    assert load(tiny, str(tmp_path / "b.jsonl")).fingerprint == load(tiny, plain).fingerprint


def test_the_packaged_corpus_is_for_the_packaged_target_only(tiny):
    with pytest.raises(UserError, match="written by smollm2, the target is tiny"):
        load(tiny, "packaged")


# ---- files


def test_a_corpus_that_the_target_writes_is_written_once(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTLAB_CACHE", str(tmp_path))
    said = []
    config = settings(source="self", write_conversations=6, write_batch=16)
    first = load_corpus(config, tiny, lambda text, doing=None: said.append(text))
    assert len(first.rows) == 6 and any("tokens/s" in text for text in said)
    said.clear()
    assert load_corpus(config, tiny, lambda text, doing=None: said.append(text)).fingerprint == first.fingerprint
    assert not any("tokens/s" in text for text in said)
    assert load_corpus(config.model_copy(update={"write_seed": 1}), tiny, quiet).fingerprint != first.fingerprint


def test_an_interrupted_write_leaves_nothing_and_spoils_nothing(tmp_path):
    path = tmp_path / "c.jsonl.gz"

    def interrupted():
        yield {**talk(1), "finished": True}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_file(path, interrupted(), {})
    assert list(tmp_path.iterdir()) == []
    write_file(path, [{**talk(2), "finished": True}], {"seed": 0})
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert set(before) == {"c.jsonl.gz", "c.yaml"}
    with pytest.raises(KeyboardInterrupt):
        write_file(path, interrupted(), {})
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


SMALL = ["target.model=tiny", "target.dtype=float32", "corpus.write_response_tokens=8", "corpus.write_batch=2"]


def build(out, *more):
    return build_corpus.main(["--out", str(out), *SMALL, "corpus.write_conversations=6", *more])


@pytest.fixture
def batches(monkeypatch):
    """How many batches were written; the one numbered `dies_at` is interrupted."""

    class Batches:
        count, dies_at = 0, None

    now, real = Batches(), corpus._continue

    def counted(*args):
        now.count += 1
        if now.count == now.dies_at:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(corpus, "_continue", counted)
    return now


@pytest.mark.parametrize("damage", [b"", b'\n{"0123', b"\n[3]"])
def test_an_interrupted_writing_goes_on_when_the_command_is_repeated(tiny, tmp_path, batches, capsys, damage):
    build(tmp_path / "whole.jsonl")
    whole = batches.count
    assert whole > 4  # prompts, and three batches of answers
    for dies_at in (2, whole - 1):
        batches.count, batches.dies_at = 0, dies_at
        with pytest.raises(KeyboardInterrupt):
            build(tmp_path / "c.jsonl")
        with (tmp_path / "c.jsonl.journal").open("ab") as file:
            file.write(damage)
        batches.dies_at = None
        assert build(tmp_path / "c.jsonl") == 0 and batches.count == whole + 1  # the interrupted one came twice
        assert "finished batches" in capsys.readouterr().out
        assert {file.name for file in tmp_path.glob("c.*")} == {"c.jsonl", "c.yaml"}
        assert (tmp_path / "c.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
        (tmp_path / "c.jsonl").unlink(), (tmp_path / "c.yaml").unlink()


def test_a_journal_of_other_settings_is_of_no_use(tmp_path, batches):
    build(tmp_path / "whole.jsonl", "corpus.write_seed=1")
    whole, batches.count, batches.dies_at = batches.count, 0, 4
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "c.jsonl")
    batches.count, batches.dies_at = 0, None
    build(tmp_path / "c.jsonl", "corpus.write_seed=1")
    assert batches.count == whole
    assert (tmp_path / "c.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_an_interrupted_corpus_in_the_cache_goes_on_too(tiny, tmp_path, monkeypatch, batches):
    monkeypatch.setenv("DRAFTLAB_CACHE", str(tmp_path))
    config, batches.dies_at = settings(source="self", write_conversations=6), 3
    with pytest.raises(KeyboardInterrupt):
        load_corpus(config, tiny, quiet)
    said, batches.dies_at = [], None
    read = load_corpus(config, tiny, lambda text, doing=None: said.append(text))
    assert len(read.rows) == 6 and any("going on after" in text for text in said)
    assert not list((tmp_path / "corpora").glob("*.journal"))


def test_a_file_that_another_process_writes_is_refused(tmp_path):
    with corpus.Journal.beside(tmp_path / "c.jsonl", quiet):
        with pytest.raises(UserError, match="c.jsonl: another process is writing it"):
            build(tmp_path / "c.jsonl")
    assert list(tmp_path.iterdir()) == []


def test_the_script_writes_a_corpus_that_loads_and_a_recipe_that_says_how(tiny, tmp_path, capsys):
    prompts = save(tmp_path / "prompts.jsonl", [{"prompt": f"question {i}"} for i in range(5)])
    out = tmp_path / "new" / "corpus.jsonl.gz"
    assert build(out, "--prompts", prompts, "corpus.write_conversations=4") == 0
    read = load(tiny, str(out))
    assert [row.messages[0]["content"] for row in read.rows] == [f"question {i}" for i in range(4)]
    recipe = yaml.safe_load(out.with_name("corpus.yaml").read_text())
    assert recipe["target"] == {"name": "tiny", "revision": None, "fingerprint": tiny.fingerprint}
    assert (recipe["conversations"], recipe["write"]["write_seed"], recipe["prompts"]) == (4, 0, prompts)
    assert recipe["supervised_tokens"] == sum(int(row.supervised.sum()) for row in read.rows)
    assert recipe["command"].startswith("python experiments/build_corpus.py --out")
    assert "wrote 4 conversations" in capsys.readouterr().out


@pytest.mark.parametrize("out", ["corpus.txt", "file/corpus.jsonl", "file.jsonl", "folder.jsonl", "recipe.jsonl.gz"])
def test_the_script_refuses_a_place_it_can_not_write_before_any_work(tmp_path, out):
    for name in ("file", "file.jsonl", "recipe.yaml"):
        (tmp_path / name).write_text("")
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(UserError, match="--out"):
        build_corpus.main(["--out", str(tmp_path / out), "target.model=/no/such/target"])


# ---- the corpus that comes with draftlab


@pytest.fixture(scope="module")
def shipped(packaged):
    return load_corpus(CorpusConfig(), packaged, quiet)


def test_the_packaged_corpus_is_what_its_recipe_says(shipped):
    recipe = yaml.safe_load(corpus.recipe_path(corpus.PACKAGED).read_text())
    assert recipe["target"]["name"] == "smollm2" and recipe["prompts"] == "self"
    assert recipe["conversations"] == len(shipped.rows) == 2000
    assert recipe["tokens"] == sum(len(row.ids) for row in shipped.rows)
    assert recipe["supervised_tokens"] == sum(int(row.supervised.sum()) for row in shipped.rows)
    assert 0.08 < len(shipped.heldout) / 2000 < 0.12


def test_the_packaged_prompts_are_varied_and_whole(shipped):
    prompts = [row.messages[0]["content"] for row in shipped.rows]
    assert len({prompt.casefold() for prompt in prompts}) == 2000
    assert len({tuple(prompt.split()[:3]) for prompt in prompts}) > 600
    assert all(len(prompt.split()) >= corpus.PROMPT_WORDS for prompt in prompts)


def test_packaged_rows_are_the_prompt_by_the_template_and_then_the_answer(shipped, packaged):
    for row in shipped.rows[::40]:
        start = int(row.supervised.argmax())
        assert row.supervised[start:].all() and not row.supervised[:start].any()
        assert row.ids[:start].tolist() == packaged.chat(list(row.messages[:1]))
        assert packaged.tokenizer.decode(row.ids[start:], skip_special_tokens=True) == row.messages[1]["content"]
        assert row.key == hashlib.sha256(json.dumps([["user", row.messages[0]["content"]]]).encode()).hexdigest()


def test_a_corpus_without_a_row_is_refused_and_leaves_nothing(tmp_path):
    with pytest.raises(UserError, match="not one conversation could be written"):
        write_file(tmp_path / "corpus.jsonl.gz", [], {"seed": 0})
    assert list(tmp_path.iterdir()) == []


def test_a_corpus_is_counted_without_its_target():
    assert corpus.count_rows(CorpusConfig()) == 2000
    assert corpus.count_rows(CorpusConfig(source="self", write_conversations=7)) == 7
    with pytest.raises(UserError, match="nowhere.jsonl"):
        corpus.count_rows(CorpusConfig(source="nowhere.jsonl"))
