"""Evaluation on the tiny target: what it reports, what it refuses, and that one bad prompt costs only itself."""

import gzip
import importlib.util
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mlflow import MlflowClient

from draftlab import checkpoint, config, decode, evaluation, findings, metrics, report
from draftlab.config import DraftConfig, EvalConfig, TargetConfig
from draftlab.decode import decode_target
from draftlab.draft import Draft, adapt
from draftlab.errors import UserError
from draftlab.init import initialise
from draftlab.prompts import Prompt
from draftlab.schedule import Schedule, fit_temperatures, reach
from draftlab.target import load_target

ROOT = Path(__file__).resolve().parents[2]
QUICK = EvalConfig(prompts=3, max_new_tokens=10, bootstrap=200)


def quiet(*_, **__):
    """No progress."""


@pytest.fixture(scope="module")
def target():
    """The tiny target, which here never ends a text, so that texts have a known length."""
    made = load_target(TargetConfig(model="tiny", dtype="float32", device="cpu"))
    made.eos_token_ids = frozenset({made.vocab_size})
    return made


def draft(target, block_size=4, seed=0):
    shape = DraftConfig(block_size=block_size, num_hidden_layers=1, target_layer_ids=[0, 2])
    made = Draft(adapt(target.config, shape, target.mask_token_id))
    made.reset(seed)
    return made.eval()


def prompts(count=3):
    return [Prompt("chat", f"question {i}", (f"Question {i}: how many?",)) for i in range(count)]


def ids(target, prompt):
    return target.chat(prompt.messages())


class Knowing(Draft):
    """A draft that knows one text and proposes its true future: the head's own rows as hidden states."""

    def propose(self, cache, embeds):
        future = (self.text[cache.length :] + [0] * embeds.shape[1])[: embeds.shape[1]]
        return self.rows[future][None]


def knowing(target, prompt):
    made = Knowing(draft(target).spec).eval()
    made.text, made.rows = ids(target, prompt), target.ends.head.weight
    made.text = made.text + decode_target(target, [made.text], 10)[0].tokens
    return made


def test_an_evaluation_says_everything_that_the_contract_asks_for(target):
    found = evaluation.evaluate(target, {"a": draft(target)}, prompts(), QUICK, quiet, 3, {"a": "abc123"})["a"]
    values = found.metrics
    for name in ("acceptance_length", "acceptance_length_macro", "speedup", "speedup_end_to_end"):
        assert values[f"{name}_low"] <= values[name] <= values[f"{name}_high"]
    assert values["prompts"] == 3 and values["failed"] == values["divergences"] == 0 and values["drafted_tokens"] == 3
    assert values["new_tokens"] == sum(row["new_tokens"] for row in found.prompts)
    assert values["rounds"] == sum(row["rounds"] for row in found.prompts) == 27
    assert sum(found.first_failure) == 24, "each text's last round had one token of room and nothing at stake"
    round_ms = values["draft_ms"] + values["verify_ms"] + values["commit_ms"]
    assert values["speedup"] == pytest.approx(values["acceptance_length"] * values["target_ms"] / round_ms, rel=1e-6)
    assert len(found.survival) == len(found.conditional_acceptance) == 3 and len(found.first_failure) == 4
    record = found.provenance
    assert record["protocol"] == "greedy" and record["checkpoint"] == "abc123" and record["block_size"] == 4
    assert record["target"] == {"name": "tiny", "revision": target.revision, "fingerprint": target.fingerprint}
    assert record["dtype"] == "float32" and record["device"].startswith("cpu") and record["threads"] >= 1
    assert record["versions"]["torch"] == torch.__version__ and record["max_new_tokens"] == 10


def test_the_metrics_are_those_of_the_kept_traces(target):
    found = evaluation.evaluate(target, {"a": draft(target)}, prompts(), QUICK, quiet)["a"]
    drafts = [pair.draft for pair in found.traces]
    assert found.metrics["acceptance_length"] == metrics.acceptance_length(drafts)
    assert found.metrics["speedup"] == metrics.speedup([pair.target for pair in found.traces], drafts)
    assert found.survival == metrics.survival(drafts, 4).tolist()


def test_a_draft_that_knows_the_future_reaches_its_block_size(target):
    asked = prompts(1)
    found = evaluation.evaluate(target, {"a": knowing(target, asked[0])}, asked, QUICK, quiet)["a"]
    # 9 tokens after the prefill's, in rounds of 4, 4 and 1.
    assert found.metrics["acceptance_length"] == pytest.approx(9 / 3)
    assert found.survival == [1.0, 1.0, 1.0] and found.metrics["full_block_fraction"] == 1.0
    assert math.isnan(found.metrics["acceptance_length_low"]), "one prompt has no interval"


def test_every_draft_meets_the_same_target_traces_and_the_order_alternates(target, monkeypatch):
    calls = []
    alone, drafted = evaluation.decode_target, evaluation.decode_speculative
    monkeypatch.setattr(evaluation, "decode_target", lambda *a: (calls.append("target"), alone(*a))[1])
    monkeypatch.setattr(
        evaluation, "decode_speculative", lambda t, d, *a: (calls.append(d.spec.block_size), drafted(t, d, *a))[1]
    )
    drafts = {"a": draft(target, 2), "b": draft(target, 4)}
    settings = QUICK.model_copy(update={"repeats": 2})
    found = evaluation.evaluate(target, drafts, prompts(), settings, quiet)
    there, back = ["target", 2, 4], [4, 2, "target"]
    assert calls == there + (there + back + there) + (back + there + back)  # warm-up, first and second repeat
    assert [p.target for p in found["a"].traces] == [p.target for p in found["b"].traces]


def test_a_prompt_that_fails_is_reported_and_costs_no_other(target, monkeypatch):
    asked, drafted = prompts(4), evaluation.decode_speculative
    broken = draft(target, 2)

    def sometimes(target, draft, batch, *rest):
        if draft is broken and ids(target, asked[1]) in batch:
            raise RuntimeError("out of\nmemory")
        return drafted(target, draft, batch, *rest)

    monkeypatch.setattr(evaluation, "decode_speculative", sometimes)
    found = evaluation.evaluate(target, {"bad": broken, "good": draft(target)}, asked, QUICK, quiet)
    assert [row["status"] for row in found["bad"].prompts] == ["ok", "failed", "ok", "ok"]
    assert found["bad"].prompts[1]["reason"] == "draft: RuntimeError: out of memory"
    assert found["bad"].metrics["failed"] == 1 and [pair.case.prompt for pair in found["bad"].traces] == [0, 2, 3]
    assert found["good"].metrics["failed"] == 0
    assert "question 1 failed: draft: RuntimeError: out of memory" in evaluation.describe(found["bad"])


def test_an_evaluation_in_which_everything_failed_has_no_numbers_and_no_zeros(target, monkeypatch, tmp_path):
    def never(*_):
        raise RuntimeError("no")

    monkeypatch.setattr(evaluation, "decode_speculative", never)
    found = evaluation.evaluate(target, {"a": draft(target)}, prompts(2), QUICK, quiet)
    assert math.isnan(found["a"].metrics["acceptance_length"]) and math.isnan(found["a"].metrics["speedup"])
    report.write_evaluation(found, tmp_path)
    written = json.loads((tmp_path / "results.json").read_text())["a"]
    assert written["metrics"]["speedup"] is None and written["metrics"]["failed"] == 2


def test_ctrl_c_is_not_a_failed_prompt(target, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluation, "decode_speculative", interrupted)
    with pytest.raises(KeyboardInterrupt):
        evaluation.evaluate(target, {"a": draft(target)}, prompts(), QUICK, quiet)


def test_results_json_is_strict_json(target, tmp_path):
    found = evaluation.evaluate(target, {"a": draft(target)}, prompts(1), QUICK, quiet)
    report.write_evaluation(found, tmp_path)

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    written = json.loads((tmp_path / "results.json").read_text(), parse_constant=refuse)
    assert written["a"]["metrics"]["acceptance_length_low"] is None  # one prompt has no interval
    (line,) = (tmp_path / "traces.jsonl").read_text().splitlines()
    rounds = json.loads(line, parse_constant=refuse)["traces"]["draft"]["rounds"]
    assert [r["committed"] for r in rounds] == [r.committed for r in found["a"].traces[0].draft.rounds]


def test_a_divergence_is_counted_and_described(target, monkeypatch):
    alone = evaluation.decode_target

    def other(*arguments):
        traces = alone(*arguments)
        for trace in traces:
            if len(trace.tokens) > 5:
                trace.tokens[5] = (trace.tokens[5] + 1) % 256
        return traces

    monkeypatch.setattr(evaluation, "decode_target", other)
    found = evaluation.evaluate(target, {"a": draft(target)}, prompts(2), QUICK, quiet)["a"]
    assert found.metrics["divergences"] == 2
    assert found.prompts[0]["divergence"]["position"] == 5 and found.prompts[0]["divergence"]["gap"] > 0
    assert '"position": 5' in evaluation.describe(found)


# ---- turns, batches, block sizes, sampling, groups


def talk(count=2):
    return [Prompt("talk", f"talk {i}", (f"Question {i}?", "And then?", "Really?"), "Be brief.") for i in range(count)]


def test_each_turn_follows_the_targets_own_answers_for_every_draft_alike(target):
    drafts = {"a": draft(target, 2), "b": draft(target, 4, seed=1)}
    found = evaluation.evaluate(target, drafts, [*prompts(1), *talk(1)], QUICK, quiet)
    assert [(p.case.prompt, p.case.turn) for p in found["a"].traces] == [(0, 1), (1, 1), (1, 2), (1, 3)]
    assert [p.case.ids for p in found["a"].traces] == [p.case.ids for p in found["b"].traces]
    (conversation,) = talk(1)
    answers = []
    for pair in found["a"].traces[1:]:
        asked = target.chat(conversation.messages(answers))
        assert pair.case.ids == asked and pair.target.tokens == decode_target(target, [asked], 10)[0].tokens
        answers.append(target.tokenizer.decode(pair.target.tokens, skip_special_tokens=True))
    values = found["a"].metrics
    assert (values["prompts"], values["answers"], values["failed"]) == (2, 4, 0)


def test_the_turns_of_a_conversation_are_one_draw_of_the_bootstrap(target):
    found = evaluation.evaluate(target, {"a": draft(target)}, talk(1), QUICK, quiet)["a"]
    assert len(found.traces) == 3 and math.isnan(found.metrics["acceptance_length_low"]), "one conversation"


def test_an_answer_that_fails_takes_the_later_turns_of_its_conversation_and_no_other(target, monkeypatch):
    alone, first = evaluation.decode_target, ids(target, talk()[0])

    def sometimes(target, batch, *rest):
        if first in batch:
            raise RuntimeError("no")
        return alone(target, batch, *rest)

    monkeypatch.setattr(evaluation, "decode_target", sometimes)
    found = evaluation.evaluate(target, {"a": draft(target)}, talk(), QUICK, quiet)["a"]
    assert [row["status"] for row in found.prompts] == ["failed"] * 3 + ["ok"] * 3
    assert found.prompts[1]["reason"] == "turn 1: RuntimeError: no"


def test_batches_give_the_same_tokens_and_rounds_as_prompts_one_by_one(target):
    drafts = {"a": draft(target)}
    asked = [*prompts(4), *talk(1)]
    one, four = (
        evaluation.evaluate(target, drafts, asked, QUICK.model_copy(update={"batch_size": size}), quiet)["a"]
        for size in (1, 4)
    )
    for a, b in zip(one.traces, four.traces, strict=True):
        assert a.case == b.case and a.target.tokens == b.target.tokens and a.draft.tokens == b.draft.tokens
        assert [r.committed for r in a.draft.rounds] == [r.committed for r in b.draft.rounds]
    assert four.provenance["batch_size"] == 4 and max(r.rows for p in four.traces for r in p.draft.rounds) == 4


def test_one_failing_prompt_in_a_hundred_costs_none_of_the_other_99(target, monkeypatch):
    asked, drafted = prompts(100), evaluation.decode_speculative
    bad, batches = ids(target, asked[42]), []

    def sometimes(target, draft, batch, *rest):
        if bad in batch:
            raise RuntimeError("no")
        batches.append(len(batch))
        return drafted(target, draft, batch, *rest)

    monkeypatch.setattr(evaluation, "decode_speculative", sometimes)
    settings = EvalConfig(max_new_tokens=3, bootstrap=100, batch_size=10)
    found = evaluation.evaluate(target, {"a": draft(target)}, asked, settings, quiet)["a"]
    assert [row["prompt"] for row in found.prompts if row["status"] == "failed"] == [42]
    assert found.prompts[42]["reason"] == "draft: RuntimeError: no"
    for pair in found.traces:  # nobody has another's numbers
        assert pair.case.ids == ids(target, asked[pair.case.prompt])
        assert pair.draft.tokens == pair.target.tokens == decode_target(target, [pair.case.ids], 3)[0].tokens
    assert batches.count(10) == 10 and batches.count(9) == 1, "the nine others of its batch are decoded together again"


def test_a_batch_that_fails_only_as_a_batch_is_a_failure_of_all(target, monkeypatch):
    alone = evaluation.decode_target

    def small(target, batch, *rest):
        if len(batch) > 1:
            raise MemoryError("too much")
        return alone(target, batch, *rest)

    monkeypatch.setattr(evaluation, "decode_target", small)
    settings = QUICK.model_copy(update={"batch_size": 2})
    found = evaluation.evaluate(target, {"a": draft(target)}, prompts(3), settings, quiet)["a"]
    assert [row["reason"] for row in found.prompts] == ["target: in a batch of 2: MemoryError: too much"] * 2 + [None]


def test_one_draft_is_decoded_at_each_block_size(target):
    drafts = {"a": draft(target, 4), "b": draft(target, 2)}
    found = evaluation.evaluate(target, drafts, prompts(), QUICK, quiet, checkpoints={"a": "x"}, block_sizes=[2, 4, 8])
    assert list(found) == [f"{name} b={size}" for name in "ab" for size in (2, 4, 8)]
    for name, one in found.items():
        assert len(one.survival) == one.provenance["block_size"] - 1 and one.metrics["divergences"] == 0
        assert one.provenance["draft"] == name[0] and one.provenance["trained_block_size"] == (4 if "a" in name else 2)
        assert one.metrics["drafted_tokens"] == one.provenance["block_size"] - 1
    table = report.block_size_table(report.by_block_size(found))
    for name, line in zip("ab", table.splitlines()[1:], strict=True):
        cells = [found[f"{name} b={size}"].metrics for size in (2, 4, 8)]
        shown = [f"{cell['acceptance_length']:.2f} x{cell['speedup']:.2f}" for cell in cells]
        assert " ".join(line.split()) == f"{name} (trained B={4 if name == 'a' else 2}) {' '.join(shown)}"
    assert len(report.by_block_size(found)) == 6
    with pytest.raises(UserError, match="block size: expected at least 2"):
        evaluation.evaluate(target, drafts, prompts(), QUICK, quiet, block_sizes=[4, 1])
    with pytest.raises(UserError, match="block size: a has 2048 positions, got 2049"):
        evaluation.evaluate(target, drafts, prompts(), QUICK, quiet, block_sizes=[4, 2049])


def sure_draft(target, temperatures=None):
    """A DSpark draft that is right now and then, and whose confidence head has opinions."""
    heads = {"variant": "dspark", "markov_head": "vanilla", "markov_rank": 8, "confidence": True}
    shape = DraftConfig(block_size=4, num_hidden_layers=1, target_layer_ids=[0, 2], **heads)
    made = Draft(replace(adapt(target.config, shape, target.mask_token_id), confidence_temperatures=temperatures))
    initialise(made, target, "target_layers", 0, torch.tensor([ids(target, prompts(1)[0])]))
    torch.manual_seed(0)
    torch.nn.init.normal_(made.confidence_head.proj.weight, std=0.2)
    return made.eval()


def test_a_confidence_head_is_scored_slot_by_slot_calibrated_or_not(target):
    drafts = {"raw": sure_draft(target), "calibrated": sure_draft(target, (3.0, 0.5, 2.0, 1.0))}
    found = evaluation.evaluate(target, drafts, prompts(5), QUICK, quiet)
    logits, accepted = metrics.confidence_items([pair.draft for pair in found["raw"].traces], 5)
    raw = metrics.confidence_scores(reach(logits), accepted)
    told = metrics.confidence_scores(reach(logits, (3.0, 0.5, 2.0, 1.0)), accepted)
    for name, scores in (("raw", raw), ("calibrated", told)):
        for kind in ("ece", "auc", "brier"):
            assert found[name].confidence[kind] == pytest.approx(scores[kind][:-1], nan_ok=True)
            assert found[name].metrics[f"confidence_{kind}"] == pytest.approx(scores[kind][-1], nan_ok=True)
    assert found["calibrated"].metrics["confidence_raw_ece"] == found["raw"].metrics["confidence_ece"]
    assert "confidence_raw_ece" not in found["raw"].metrics
    said = evaluation.describe(found["raw"])
    assert re.search(r"confidence ece by slot +(\d\.\d{3} ?){4}\n", said) and "confidence_brier" in said
    plain = evaluation.evaluate(target, {"a": draft(target)}, prompts(1), QUICK, quiet)["a"]
    assert plain.confidence == {} and not any(name.startswith("confidence") for name in plain.metrics)


def test_a_calibration_is_fitted_on_the_later_prompts_and_scored_on_the_earlier(target):
    found = evaluation.evaluate(target, {"a": sure_draft(target)}, prompts(7), QUICK, quiet)["a"]
    temperatures, scores = evaluation.calibrate(found)
    later = metrics.confidence_items([p.draft for p in found.traces if p.case.prompt >= 4], 5)
    logits, accepted = metrics.confidence_items([p.draft for p in found.traces if p.case.prompt < 4], 5)
    assert temperatures == fit_temperatures(*later)
    assert scores["ece"] == pytest.approx(
        metrics.confidence_scores(reach(logits, temperatures), accepted)["ece"], nan_ok=True
    )
    assert scores["raw_ece"] == pytest.approx(metrics.confidence_scores(reach(logits), accepted)["ece"], nan_ok=True)
    alone = evaluation.evaluate(target, {"a": sure_draft(target)}, prompts(2), QUICK, quiet)["a"]
    with pytest.raises(UserError, match="in both halves of 2 prompts"):
        evaluation.calibrate(replace(alone, traces=alone.traces[:1]))


def test_every_domain_has_a_part_in_the_calibration_and_in_its_scores(target):
    asked = [*prompts(4), *(Prompt("code", f"task {i}", (f"Write {i}.",)) for i in range(3))]
    found = evaluation.evaluate(target, {"a": sure_draft(target)}, asked, QUICK, quiet)["a"]
    later = metrics.confidence_items([p.draft for p in found.traces if p.case.prompt in (2, 3, 6)], 5)
    assert evaluation.calibrate(found)[0] == fit_temperatures(*later)


def test_schedules_of_one_draft_stand_apart_in_the_table_of_block_sizes(target):
    drafts = {"a": sure_draft(target), "b": sure_draft(target)}
    both = ["fixed", "confidence"]
    found = evaluation.evaluate(target, drafts, prompts(1), QUICK, quiet, block_sizes=[2, 4], schedules=both)
    frame = report.by_block_size(found)
    assert list(frame["draft"].unique()) == ["a fixed", "a confidence", "b fixed", "b confidence"]
    assert not frame.duplicated(["draft", "block_size"]).any()


def test_one_draft_is_decoded_by_each_schedule(target, monkeypatch):
    plan, asked = Schedule({1: [1.0, 1.4, 1.7, 2.0, 2.3]}), []

    def measured(*arguments):
        asked.append(arguments[2:5])
        return plan

    monkeypatch.setattr(evaluation.surface, "schedule", measured)
    found = evaluation.evaluate(
        target, {"a": sure_draft(target)}, prompts(4), QUICK, quiet, schedules=["fixed", "confidence"]
    )
    assert list(found) == ["a fixed", "a confidence"]
    assert asked == [([ids(target, prompt) for prompt in prompts(4)], 4, 1)]
    fixed, planned = found.values()
    assert planned.metrics["verified_tokens"] < fixed.metrics["verified_tokens"] < 4
    assert planned.metrics["divergences"] == fixed.metrics["divergences"] == 0
    assert (fixed.provenance["schedule"], planned.provenance["schedule"]) == ("fixed", "confidence")
    assert planned.provenance["round_seconds"] == plan.seconds and "round_seconds" not in fixed.provenance
    assert fixed.metrics["walk_agreement"] == 1 and "walk_agreement" not in planned.metrics


def test_a_schedule_is_measured_on_the_machine(target):
    settings = QUICK.model_copy(update={"schedule": "confidence", "batch_size": 2})
    found = evaluation.evaluate(target, {"a": sure_draft(target)}, prompts(3), settings, quiet)["a"]
    seconds = found.provenance["round_seconds"]
    assert set(seconds) == {1, 2} and all(len(costs) == 5 and min(costs) > 0 for costs in seconds.values())
    assert found.metrics["divergences"] == 0


def test_a_schedule_without_a_confidence_head_is_refused(target, no_decoding):
    settings = QUICK.model_copy(update={"schedule": "confidence"})
    words = "eval.schedule=confidence: needs draft.confidence=true, but plain has no confidence head"
    with pytest.raises(UserError, match=words):
        evaluation.evaluate(target, {"a": sure_draft(target), "plain": draft(target)}, prompts(), settings, quiet)


@pytest.mark.parametrize("mode", ["rejection", "greedy_draft"])
def test_a_sampled_evaluation_names_its_protocol_repeats_and_counts_no_divergences(target, mode):
    settings = QUICK.model_copy(update={"temperature": 1.0, "top_p": 0.9, "mode": mode})
    one, two = (evaluation.evaluate(target, {"a": draft(target)}, prompts(), settings, quiet, 5)["a"] for _ in range(2))
    assert one.provenance["protocol"] == f"{mode}, temperature 1, top-p 0.9"
    assert [p.draft.tokens for p in one.traces] == [p.draft.tokens for p in two.traces]
    assert one.metrics["divergences"] == 0 and "walk_agreement" not in one.metrics


def test_results_are_broken_down_by_domain_turn_context_and_position(target):
    found = evaluation.evaluate(target, {"a": draft(target)}, [*prompts(2), *talk(2)], QUICK, quiet)["a"]
    rows = {(row["by"], row["group"]): row for row in found.breakdown}
    assert rows["domain", "chat"]["answers"] == 2 and rows["domain", "talk"]["answers"] == 6
    assert [rows["turn", str(turn)]["answers"] for turn in (1, 2, 3)] == [4, 2, 2]
    for by in ("domain", "turn", "context", "position"):
        some = [row for row in found.breakdown if row["by"] == by]
        assert sum(row["rounds"] for row in some) == found.metrics["rounds"]
        tokens = sum(row["rounds"] * row["acceptance_length"] for row in some)
        assert tokens == pytest.approx(found.metrics["rounds"] * found.metrics["acceptance_length"])
    talks = [pair.draft for pair in found.traces if pair.case.domain == "talk"]
    assert rows["domain", "talk"]["acceptance_length"] == metrics.acceptance_length(talks)
    assert "talk" in evaluation.describe(found) and "position" in evaluation.describe(found)


@pytest.mark.parametrize("tokens, bucket", [(0, 16), (15, 16), (16, 32), (31, 32), (32, 64), (1000, 1024)])
def test_buckets_double(tokens, bucket):
    assert evaluation._bucket(tokens) == bucket


def test_thinking_and_a_system_prompt_reach_the_chat_template(target, monkeypatch):
    plain = target.tokenizer.chat_template
    template = "{% if enable_thinking %}<think>{% endif %}" + plain
    settings = QUICK.model_copy(update={"thinking": True, "system": "Be nice."})
    with pytest.raises(UserError, match="eval.thinking=True: the chat template of tiny has no thinking mode"):
        evaluation.evaluate(target, {"a": draft(target)}, prompts(1), settings, quiet)
    monkeypatch.setattr(target.tokenizer, "chat_template", template)
    found = evaluation.evaluate(target, {"a": draft(target)}, prompts(1), settings, quiet)["a"]
    text = target.tokenizer.decode(found.traces[0].case.ids)
    assert text.startswith("<think>") and "Be nice." in text and "Question 0" in text
    assert found.provenance["thinking"] is True and found.provenance["system"] == "Be nice."


def test_a_checkpoint_is_not_different_from_itself_and_better_than_a_worse_one(target):
    (asked,) = prompts(1)
    drafts = {"one": draft(target), "same": draft(target), "good": knowing(target, asked)}
    found = evaluation.evaluate(target, drafts, [asked] * 4, QUICK, quiet)
    arms = {name: {0: result.traces} for name, result in found.items()}
    for measure in ("acceptance_length", "speedup"):
        verdicts = {one.arm: one for one in findings.verdicts(arms, measure, "one", 200, seed=0)}
        own = {name: result.metrics[measure] for name, result in found.items()}
        assert {name: one.value for name, one in verdicts.items()} == pytest.approx(own)
        assert verdicts["good"].difference == pytest.approx(own["good"] - own["one"])
        if measure == "acceptance_length":
            assert verdicts["good"].verdict == "better" and verdicts["good"].difference_low > 0
            assert (verdicts["same"].verdict, verdicts["same"].difference_high) == ("no difference", 0)


# ---- refusals, all before any decoding


@pytest.fixture()
def no_decoding(monkeypatch):
    def decoded(*_):
        raise AssertionError("decoding had begun")

    monkeypatch.setattr(evaluation, "_attempt", decoded)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_refused(target, no_decoding, value):
    bad = draft(target)
    with torch.no_grad():
        bad.layers[0].mlp.up_proj.weight[3, 4] = value
    with pytest.raises(UserError, match=r"bad: layers.0.mlp.up_proj.weight holds NaN or infinite"):
        evaluation.evaluate(target, {"fine": draft(target), "bad": bad}, prompts(), QUICK, quiet)


def test_a_draft_for_another_target_is_refused(target, no_decoding):
    other = target.config.__class__(**{**target.config.to_dict(), "vocab_size": 4000})
    stranger = Draft(adapt(other, DraftConfig(num_hidden_layers=1, target_layer_ids=[0]), 1))
    with pytest.raises(UserError, match="vocabulary 4000, but tiny has 300"):
        evaluation.evaluate(target, {"a": stranger}, prompts(), QUICK, quiet)


def test_a_prompt_longer_than_the_targets_positions_is_refused(target, no_decoding):
    long = Prompt("chat", "prompts chat.jsonl, line 7", ("a" * target.max_positions,))
    words = f"^prompts chat.jsonl, line 7: prompt of .* {target.max_positions} positions"
    with pytest.raises(UserError, match=words):
        evaluation.evaluate(target, {"a": draft(target)}, [*prompts(), long], QUICK, quiet)


def test_nothing_to_decode_is_refused(target):
    with pytest.raises(UserError, match="one draft and one prompt, got 1 and 0"):
        evaluation.evaluate(target, {"a": draft(target)}, [], QUICK, quiet)


# ---- the scripts


@pytest.fixture()
def saved(target, tmp_path):
    """A trainer's checkpoint folder, its draft inside."""
    run = config.load(config.CONFIGS / "tiny.yaml", ["draft.target_layer_ids=[0,2]", "seed=5"])
    made_for = {"name": "tiny", "revision": None, "fingerprint": "x"}
    checkpoint.save(tmp_path / "step" / "draft", draft(target), run, made_for)
    return tmp_path / "step"


@pytest.fixture()
def saved_sure(target, tmp_path):
    """A DSpark draft's checkpoint."""
    heads = ["draft.variant=dspark", "draft.markov_head=vanilla", "draft.markov_rank=8", "draft.confidence=true"]
    heads += ["loss.confidence=1", "features.last_hidden=true", "draft.target_layer_ids=[0,2]", "seed=5"]
    run = config.load(config.CONFIGS / "tiny.yaml", heads)
    checkpoint.save(tmp_path / "sure", sure_draft(target), run, {"name": "tiny", "revision": None, "fingerprint": "x"})
    return tmp_path / "sure"


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "evals" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


def test_the_acceptance_script_writes_results_figures_and_an_mlflow_run(saved, outputs, store, monkeypatch, capsys):
    monkeypatch.chdir(outputs.parent)  # its tracking store is the one in ./outputs
    short = ["eval.max_new_tokens=8", "eval.bootstrap=100"]
    assert script("acceptance")(["--ckpt", str(saved), "--prompts", "humaneval:2", "--out", "out", *short]) == 0
    (results,) = json.loads((outputs.parent / "out" / "results.json").read_text()).values()
    assert results["metrics"]["prompts"] == 2 and results["metrics"]["divergences"] == 0
    said = capsys.readouterr().out
    assert "acceptance_length" in said and "mlflow ui" in said
    client = MlflowClient(store.uri)
    (run,) = client.search_runs([store.experiment_id])
    assert run.info.run_id in said and run.info.status == "FINISHED"
    assert run.data.metrics["acceptance_length"] == results["metrics"]["acceptance_length"]
    assert run.data.params["checkpoint"] == results["provenance"]["checkpoint"]
    kept = {artifact.path for artifact in client.list_artifacts(run.info.run_id)}
    assert {"results.json", "traces.jsonl", "breakdown.csv", "prompts.csv"} <= kept
    assert {"survival.png", "first_failure.png", "breakdown.png"} <= kept


def test_an_evaluation_of_a_tracked_checkpoint_is_linked_to_the_run_that_trained_it(saved, outputs, store, monkeypatch):
    monkeypatch.chdir(outputs.parent)
    trained = store.start_run("trial", key="trial")
    model = store.log_checkpoint(trained, saved / "draft", name="draft", step=1, params={}, metrics={})
    arguments = ["--prompts", "humaneval:2", "eval.max_new_tokens=8", "eval.bootstrap=100"]
    assert script("acceptance")(["--ckpt", str(saved), *arguments, "--out", "by_folder"]) == 0
    assert script("acceptance")(["--ckpt", trained, *arguments, "--out", "by_run"]) == 0
    client = MlflowClient(store.uri)
    ids = [run.info.run_id for run in client.search_runs([store.experiment_id])]
    runs = [client.get_run(run_id) for run_id in ids if run_id != trained]
    assert len(runs) == 2
    for run in runs:
        assert run.data.tags["draftlab.training_runs"] == trained
        assert [used.model_id for used in run.inputs.model_inputs] == [model]
    measured = {metric.key: metric.value for metric in client.get_logged_model(model).metrics}
    assert measured["acceptance_length"] == runs[0].data.metrics["acceptance_length"]


def test_the_acceptance_script_makes_the_table_of_trained_by_decoded_block_size(saved, outputs, monkeypatch, capsys):
    monkeypatch.chdir(outputs.parent)
    gzip.open("chat.jsonl.gz", "wt").write('{"turns": ["How many?", "And then?"]}\n')
    arguments = ["--ckpt", str(saved), "--prompts", "chat.jsonl.gz,humaneval:1", "--block-sizes", "2,4", "--out", "out"]
    assert script("acceptance")([*arguments, "eval.max_new_tokens=8", "eval.bootstrap=100", "eval.batch_size=2"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"decoded b = +2 +4\n\S+ \(trained B=4\)( +\d\.\d\d x\d\.\d\d){2}", said)
    assert re.search(r"domain +chat +2 ", said) and re.search(r"turn +2 +1 ", said)
    results = json.loads(Path("out/results.json").read_text())
    assert [result["provenance"]["block_size"] for result in results.values()] == [2, 4]
    assert {row["by"] for row in results["step b=2"]["breakdown"]} == {"domain", "turn", "context", "position"}
    assert Path("out/block_sizes.png").exists() and len(Path("out/block_sizes.csv").read_text().splitlines()) == 3
    with pytest.raises(UserError, match="--block-sizes is what sets that here"):
        script("acceptance")([*arguments[:-2], "eval.block_sizes=[2]"])


def test_the_compare_script_says_no_difference_of_a_checkpoint_and_itself(saved, outputs, monkeypatch, capsys):
    monkeypatch.chdir(outputs.parent)
    twice = ["--ckpt", str(saved), "--ckpt", str(saved), "--prompts", "humaneval:3", "--out", "out"]
    assert script("compare")([*twice, "eval.max_new_tokens=8", "eval.bootstrap=100"]) == 0
    assert re.search(r"acceptance_length .* \+0.000 \[\+0.000, \+0.000\] no difference", capsys.readouterr().out)
    lines = Path("out/verdicts.csv").read_text().splitlines()
    assert Path("out/verdicts.png").exists() and len(lines) == 1 + 2 * len(evaluation.MEASURES)
    with pytest.raises(UserError, match="at least two"):
        script("compare")(["--ckpt", str(saved)])
    with pytest.raises(UserError, match="eval.block_sizes: here each draft is decoded with its own"):
        script("compare")(["--ckpt", str(saved), "--ckpt", str(saved), "eval.block_sizes=[2]"])


def test_the_compare_script_sets_schedules_against_each_other(saved_sure, saved, outputs, monkeypatch, capsys):
    monkeypatch.chdir(outputs.parent)
    arguments = ["--prompts", "humaneval:2", "--schedules", "fixed,confidence", "eval.max_new_tokens=8"]
    assert script("compare")(["--ckpt", str(saved_sure), *arguments, "--out", "out", "eval.bootstrap=100"]) == 0
    assert re.search(r"against sure fixed\n(.*\n)+ *sure confidence +speedup ", capsys.readouterr().out)
    assert len(Path("out/verdicts.csv").read_text().splitlines()) == 1 + 2 * len(evaluation.MEASURES)
    with pytest.raises(UserError, match="eval.schedule=confidence: needs draft.confidence=true, but step"):
        script("compare")(["--ckpt", str(saved), *arguments, "--out", "other"])
    with pytest.raises(UserError, match="eval.schedule: input should be 'fixed' or 'confidence', got 'late'"):
        script("compare")(["--ckpt", str(saved_sure), "--schedules", "fixed,late"])
    with pytest.raises(UserError, match="--schedules: expected each once, got fixed,fixed"):
        script("compare")(["--ckpt", str(saved_sure), "--schedules", "fixed,fixed"])


def test_the_calibrate_script_writes_a_draft_that_the_others_take(saved_sure, saved, outputs, monkeypatch, capsys):
    monkeypatch.chdir(outputs.parent)
    arguments = ["--prompts", "humaneval:4", "eval.max_new_tokens=8", "eval.bootstrap=100"]
    assert script("calibrate")(["--ckpt", str(saved_sure), "--out", "sure2", *arguments]) == 0
    said = capsys.readouterr().out
    assert re.search(r"temperature( +\d+\.\d{3}){4}\n", said) and re.search(r"raw_ece( +\d\.\d{3}){5}\n", said)
    before, after, rest = re.search(r"calibration error (\S+) before, (\d\.\d{3}) after(.*)", said).groups()
    assert before == after or ("no better" in rest) == (after > before)
    made, _ = checkpoint.load(Path("sure2"))
    assert len(made.spec.confidence_temperatures) == 4
    how = json.loads(Path("sure2/provenance.json").read_text())["calibration"]
    assert how["protocol"].startswith("greedy") and how["prompts_hash"] and how["versions"]["torch"]
    arguments += ["eval.schedule=confidence", "--out", "out"]
    assert script("acceptance")(["--ckpt", "sure2", *arguments]) == 0
    (results,) = json.loads(Path("out/results.json").read_text()).values()
    assert results["provenance"]["schedule"] == "confidence" and set(results["provenance"]["round_seconds"]) == {"1"}
    assert {"ece", "auc", "brier", "raw_ece"} == set(results["confidence"])
    with pytest.raises(UserError, match="expected a draft with a confidence head"):
        script("calibrate")(["--ckpt", str(saved), "--out", "other", "--prompts", "humaneval:2"])
    with pytest.raises(UserError, match="sure2: is there already"):
        script("calibrate")(["--ckpt", str(saved_sure), "--out", "sure2"])
    decoded, broken = decode.decode_target, ids(load_target(TargetConfig(model="tiny")), Prompt("c", "w", ("break",)))

    def fails(target, asked, *rest):
        if broken in asked:
            raise RuntimeError("no space")
        return decoded(target, asked, *rest)

    monkeypatch.setattr(evaluation, "decode_target", fails)
    Path("chat.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("a", "break", "c", "d")))
    arguments = ["--prompts", "chat.jsonl", "eval.max_new_tokens=8", "eval.bootstrap=100"]
    capsys.readouterr()
    assert script("calibrate")(["--ckpt", str(saved_sure), "--out", "sure3", *arguments]) == 1
    assert "prompts chat.jsonl, line 2 failed: target: RuntimeError: no space" in capsys.readouterr().out
    with pytest.raises(UserError, match="sure2: is there already"):
        script("calibrate")(["--ckpt", str(saved_sure), "--out", "sure2"])


def test_the_surface_script_takes_a_draft_of_the_layout_next(saved_sure, outputs, monkeypatch):
    monkeypatch.chdir(outputs.parent)
    small = ["--block-sizes", "2,4", "--batches", "1", "--contexts", "8", "--prompts", "humaneval:2", "--out", "out"]
    assert script("speed_surface")(["--ckpt", str(saved_sure), *small, "eval.max_new_tokens=8"]) == 0
    rows = [line.split(",") for line in Path("out/surface.csv").read_text().splitlines()]
    column = rows[0].index("drafted_tokens")
    assert [(row[1], row[column]) for row in rows[1:4]] == [("2", "2"), ("3", "3"), ("4", "4")]


@pytest.mark.parametrize(
    "wrong, complaint",
    [
        (["--samples", "1"], "--samples: expected 0, or 100 texts at least for a test to tell anything, got 1"),
        (["--draws", "-5"], "--draws: expected 0, or 100 texts"),
        (["eval.temperature=1"], "override 'eval.temperature=1': here it is 0 word for word"),
        (["eval.batch_size=8"], "override 'eval.batch_size=8': here it is 1"),
        (["eval.top_p=0.9"], "override 'eval.top_p=0.9': the distributions are whole"),
    ],
)
def test_the_losslessness_script_refuses_what_it_would_not_do(saved, wrong, complaint):
    with pytest.raises(UserError, match=complaint):
        script("losslessness")(["--ckpt", str(saved), *wrong])


def test_the_losslessness_script_decodes_by_schedule(saved_sure, outputs, monkeypatch, capsys):
    monkeypatch.chdir(outputs.parent)
    arguments = ["--ckpt", str(saved_sure), "--prompts", "humaneval:2", "--draws", "0", "--samples", "100"]
    assert script("losslessness")([*arguments, "eval.max_new_tokens=8", "eval.schedule=confidence"]) == 0
    assert "0 diverge" in capsys.readouterr().out


def test_the_surface_script_sets_prediction_beside_measurement(saved, outputs, monkeypatch, capsys):
    monkeypatch.chdir(outputs.parent)
    small = ["--block-sizes", "2,4", "--batches", "1,2", "--contexts", "8,32", "--prompts", "humaneval:2,heldout:1"]
    arguments = ["--ckpt", str(saved), *small, "--out", "out", "eval.max_new_tokens=8", "eval.bootstrap=100"]
    assert script("speed_surface")(arguments) == 0
    said = capsys.readouterr().out
    assert "prediction and measurement" in said and "the predicted best block size at batch 1 is" in said
    rows = [line.split(",")[:3] for line in Path("out/surface.csv").read_text().splitlines()[1:]]
    assert rows == [[domain, str(size), str(batch)] for domain in ("all", "humaneval", "heldout")
                    for batch in (1, 2) for size in (2, 3, 4)]  # fmt: skip
    assert len(Path("out/prediction.csv").read_text().splitlines()) == 3 and Path("out/surface.png").exists()
    with pytest.raises(UserError, match="expected one --ckpt, --block-sizes of at least 2"):
        script("speed_surface")(["--ckpt", str(saved), "--block-sizes", "1,4"])


@pytest.mark.parametrize("name", ["acceptance", "compare", "speed_surface"])
def test_a_broken_prompts_file_ends_a_script_before_it_decodes(saved, outputs, monkeypatch, no_decoding, name):
    monkeypatch.chdir(outputs.parent)
    Path("chat.jsonl").write_text('{"prompt": "fine"}\n{"conversations": [{"from": "gpt", "value": "x"}]}\n')
    twice = ["--ckpt", str(saved)] * (2 if name == "compare" else 1)
    with pytest.raises(UserError, match="^prompts chat.jsonl, line 2: the conversation starts with the assistant"):
        script(name)([*twice, "--prompts", "humaneval:1,chat.jsonl"])


@pytest.mark.parametrize("signal, status", [(KeyboardInterrupt, "KILLED"), (SystemExit, "KILLED")])
def test_a_stopped_script_leaves_no_run_running(saved, outputs, store, monkeypatch, signal, status):
    monkeypatch.chdir(outputs.parent)

    def stopped(*_):
        raise signal

    monkeypatch.setattr(evaluation, "decode_speculative", stopped)
    with pytest.raises(signal):
        script("acceptance")(["--ckpt", str(saved), "--prompts", "humaneval:1", "eval.max_new_tokens=2"])
    (run,) = MlflowClient(store.uri).search_runs([store.experiment_id])
    assert run.info.status == status


def test_an_acceptance_script_that_breaks_leaves_no_run_running(saved, outputs, store, monkeypatch):
    monkeypatch.chdir(outputs.parent)

    def broken(*_, **__):
        raise RuntimeError("no space")

    monkeypatch.setattr(report, "write_evaluation", broken)
    with pytest.raises(RuntimeError):
        script("acceptance")(["--ckpt", str(saved), "--prompts", "humaneval:1", "eval.max_new_tokens=2"])
    (run,) = MlflowClient(store.uri).search_runs([store.experiment_id])
    assert run.info.status == "FAILED" and run.data.tags["draftlab.reason"] == "RuntimeError: no space"


def test_the_losslessness_script_passes_a_real_draft_and_catches_a_wrong_one(saved, outputs, monkeypatch, capsys):
    monkeypatch.chdir(outputs.parent)
    arguments = ["--ckpt", str(saved), "--prompts", "humaneval:2,heldout:2", "eval.max_new_tokens=8"]
    arguments += ["--draws", "8000", "--samples", "300"]
    assert script("losslessness")(arguments) == 0
    said = capsys.readouterr().out
    assert re.search(r"4 of 4 prompts, \d+ tokens in \d+ rounds, 0 diverge", said)
    assert len(re.findall(r"(rejection|greedy_draft) against .*: no difference, p", said)) == 4
    assert "without the residual against exact probabilities: they differ" in said
    arguments += ["--draws", "0", "--samples", "0"]
    with pytest.raises(UserError, match="^override 'target.dtype=bfloat16': --dtype is what sets that here"):
        script("losslessness")([*arguments, "target.dtype=bfloat16"])
    with pytest.raises(UserError, match=r"^prompts humaneval, HumanEval/0: prompt of \d+ tokens .* has 2048 positions"):
        script("losslessness")([*arguments, "eval.max_new_tokens=2048"])
    leading = decode.leading

    def careless(kept, stake):  # takes the first guess unseen
        return leading(kept, stake).clamp(min=min(1, kept.shape[1]))

    monkeypatch.setattr(decode, "leading", careless)
    assert script("losslessness")(arguments) == 1
    assert re.search(r"humaneval, HumanEval/0 diverges at token \d", capsys.readouterr().out)
