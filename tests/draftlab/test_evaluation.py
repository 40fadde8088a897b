"""Evaluation on the tiny target: what it reports, what it refuses, and that one bad prompt costs only itself."""

import importlib.util
import json
import math
import re
from pathlib import Path

import pytest
import torch
from mlflow import MlflowClient

from draftlab import checkpoint, config, decode, evaluation, metrics, report
from draftlab.config import DraftConfig, EvalConfig, Run, TargetConfig
from draftlab.decode import decode_target
from draftlab.draft import Draft, adapt
from draftlab.errors import UserError
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


def prompts(target, count=3):
    return [target.chat([{"role": "user", "content": f"Question {i}: how many?"}]) for i in range(count)]


class Knowing(Draft):
    """A draft that knows one text and proposes its true future: the head's own rows as hidden states."""

    def propose(self, cache, embeds):
        future = (self.text[cache.length :] + [0] * embeds.shape[1])[: embeds.shape[1]]
        return self.rows[future][None]


def knowing(target, prompt):
    made = Knowing(draft(target).spec).eval()
    made.text, made.rows = prompt + decode_target(target, [prompt], 10)[0].tokens, target.ends.head.weight
    return made


def test_an_evaluation_says_everything_that_the_contract_asks_for(target):
    found = evaluation.evaluate(target, {"a": draft(target)}, prompts(target), QUICK, quiet, 3, {"a": "abc123"})["a"]
    values = found.metrics
    for name in ("acceptance_length", "acceptance_length_macro", "speedup", "speedup_end_to_end"):
        assert values[f"{name}_low"] <= values[name] <= values[f"{name}_high"]
    assert values["prompts"] == 3 and values["failed"] == values["divergences"] == 0
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
    found = evaluation.evaluate(target, {"a": draft(target)}, prompts(target), QUICK, quiet)["a"]
    drafts = [pair.draft for pair in found.traces]
    assert found.metrics["acceptance_length"] == metrics.acceptance_length(drafts)
    assert found.metrics["speedup"] == metrics.speedup([pair.target for pair in found.traces], drafts)
    assert found.survival == metrics.survival(drafts, 4).tolist()


def test_a_draft_that_knows_the_future_reaches_its_block_size(target):
    asked = prompts(target, 1)
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
    found = evaluation.evaluate(target, drafts, prompts(target), settings, quiet)
    there, back = ["target", 2, 4], [4, 2, "target"]
    assert calls == there + (there + back + there) + (back + there + back)  # warm-up, first and second repeat
    assert [p.target for p in found["a"].traces] == [p.target for p in found["b"].traces]


def test_a_prompt_that_fails_is_reported_and_costs_no_other(target, monkeypatch):
    asked, drafted = prompts(target, 4), evaluation.decode_speculative
    broken = draft(target, 2)

    def sometimes(target, draft, ids, limit):
        if draft is broken and ids == [asked[1]]:
            raise RuntimeError("out of\nmemory")
        return drafted(target, draft, ids, limit)

    monkeypatch.setattr(evaluation, "decode_speculative", sometimes)
    found = evaluation.evaluate(target, {"bad": broken, "good": draft(target)}, asked, QUICK, quiet)
    assert [row["status"] for row in found["bad"].prompts] == ["ok", "failed", "ok", "ok"]
    assert found["bad"].prompts[1]["reason"] == "draft: RuntimeError: out of memory"
    assert found["bad"].metrics["failed"] == 1 and [pair.prompt for pair in found["bad"].traces] == [0, 2, 3]
    assert found["good"].metrics["failed"] == 0
    assert "prompt 1 failed: draft: RuntimeError: out of memory" in evaluation.describe(found["bad"])
    # The comparison is over the prompts that both have.
    assert evaluation.compare(found["good"], found["bad"], "acceptance_length", 200) == (0, 0, 0)


def test_an_evaluation_in_which_everything_failed_has_no_numbers_and_no_zeros(target, monkeypatch, tmp_path):
    def never(*_):
        raise RuntimeError("no")

    monkeypatch.setattr(evaluation, "decode_speculative", never)
    found = evaluation.evaluate(target, {"a": draft(target)}, prompts(target, 2), QUICK, quiet)
    assert math.isnan(found["a"].metrics["acceptance_length"]) and math.isnan(found["a"].metrics["speedup"])
    report.write_evaluation(found, tmp_path)
    written = json.loads((tmp_path / "results.json").read_text())["a"]
    assert written["metrics"]["speedup"] is None and written["metrics"]["failed"] == 2


def test_ctrl_c_is_not_a_failed_prompt(target, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluation, "decode_speculative", interrupted)
    with pytest.raises(KeyboardInterrupt):
        evaluation.evaluate(target, {"a": draft(target)}, prompts(target), QUICK, quiet)


def test_results_json_is_strict_json(target, tmp_path):
    found = evaluation.evaluate(target, {"a": draft(target)}, prompts(target, 1), QUICK, quiet)
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

    def other(target, ids, limit):
        (trace,) = alone(target, ids, limit)
        trace.tokens[5] = (trace.tokens[5] + 1) % 256
        return [trace]

    monkeypatch.setattr(evaluation, "decode_target", other)
    found = evaluation.evaluate(target, {"a": draft(target)}, prompts(target, 2), QUICK, quiet)["a"]
    assert found.metrics["divergences"] == 2
    assert found.prompts[0]["divergence"]["position"] == 5 and found.prompts[0]["divergence"]["gap"] > 0
    assert '"position": 5' in evaluation.describe(found)


def test_two_drafts_are_compared_prompt_by_prompt(target):
    (prompt,) = prompts(target, 1)
    drafts = {"good": knowing(target, prompt), "poor": draft(target)}
    found = evaluation.evaluate(target, drafts, [prompt] * 3, QUICK, quiet)
    difference, low, high = evaluation.compare(found["good"], found["poor"], "acceptance_length", 200)
    own = [found[name].metrics["acceptance_length"] for name in ("good", "poor")]
    assert difference == pytest.approx(own[0] - own[1]) and 0 < low <= difference <= high
    faster, _, _ = evaluation.compare(found["good"], found["poor"], "speedup", 200)
    assert faster == pytest.approx(found["good"].metrics["speedup"] - found["poor"].metrics["speedup"])


def test_evaluations_of_other_prompts_are_not_compared(target):
    drafts = {"a": draft(target)}
    one = evaluation.evaluate(target, drafts, prompts(target, 1), QUICK, quiet)["a"]
    two = evaluation.evaluate(target, drafts, prompts(target, 2), QUICK, quiet)["a"]
    with pytest.raises(ValueError, match="same prompts"):
        evaluation.compare(one, two, "speedup", 200)


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
        evaluation.evaluate(target, {"fine": draft(target), "bad": bad}, prompts(target), QUICK, quiet)


def test_a_draft_for_another_target_is_refused(target, no_decoding):
    other = target.config.__class__(**{**target.config.to_dict(), "vocab_size": 4000})
    stranger = Draft(adapt(other, DraftConfig(num_hidden_layers=1, target_layer_ids=[0]), 1))
    with pytest.raises(UserError, match="vocabulary 4000, but tiny has 300"):
        evaluation.evaluate(target, {"a": stranger}, prompts(target), QUICK, quiet)


def test_a_prompt_longer_than_the_targets_positions_is_refused(target, no_decoding):
    long = [1] * (target.max_positions - 9)
    with pytest.raises(UserError, match=f"prompt of {len(long)} tokens .* {target.max_positions} positions"):
        evaluation.evaluate(target, {"a": draft(target)}, [*prompts(target), long], QUICK, quiet)


def test_nothing_to_decode_is_refused(target):
    with pytest.raises(UserError, match="one draft and one prompt, got 1 and 0"):
        evaluation.evaluate(target, {"a": draft(target)}, [], QUICK, quiet)


# ---- prompts


def test_humaneval_has_164_prompts_and_a_part_of_it_is_spread_evenly(target):
    every = evaluation.load_prompts("humaneval:1000", Run(), target, quiet)
    some = evaluation.load_prompts("humaneval:4", Run(), target, quiet)
    assert len(every) == 164 and some == [every[i] for i in (0, 41, 82, 123)]
    assert len(evaluation.load_prompts("humaneval", Run(), target, quiet)) == EvalConfig().prompts
    assert "has_close_elements" in every[0][0]["content"] and every[0][0]["role"] == "user"


def test_a_jsonl_file_may_hold_messages_prompts_or_turns(target, tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"prompt": "c"},
        {"turns": ["d", "e"]},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n\n".join(json.dumps(row) for row in rows))
    found = evaluation.load_prompts(str(path), Run(), target, quiet)
    assert [[m["content"] for m in conversation] for conversation in found] == [["a"], ["c"], ["d"]]


@pytest.mark.parametrize(
    "text, words",
    [
        ('{"prompt": "fine"}\n{"prompt": 3}', r"line 2: expected .*messages"),
        ('{"messages": []}', "line 1: expected"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "line 1: expected"),
        ('{"turns": []}', "line 1: expected"),
        ("{broken", "line 1: not valid JSON"),
        ("", "at least one, got none"),
    ],
)
def test_broken_prompt_files_are_refused_with_the_line(target, tmp_path, text, words):
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=words):
        evaluation.load_prompts(str(path), Run(), target, quiet)


def test_unknown_prompts_are_refused(target):
    with pytest.raises(UserError, match="expected heldout, humaneval or a .jsonl file"):
        evaluation.load_prompts("nowhere.jsonl", Run(), target, quiet)


# ---- the scripts


@pytest.fixture()
def saved(target, tmp_path):
    """A trainer's checkpoint folder, its draft inside."""
    run = config.load(config.CONFIGS / "tiny.yaml", ["draft.target_layer_ids=[0,2]", "seed=5"])
    made_for = {"name": "tiny", "revision": None, "fingerprint": "x"}
    checkpoint.save(tmp_path / "step" / "draft", draft(target), run, made_for)
    return tmp_path / "step"


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
    assert {"results.json", "traces.jsonl", "survival.png", "first_failure.png", "prompts.csv"} <= kept


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
    leading = decode.leading

    def careless(kept, stake):  # takes the first guess unseen
        return leading(kept, stake).clamp(min=min(1, kept.shape[1]))

    monkeypatch.setattr(decode, "leading", careless)
    assert script("losslessness")(arguments) == 1
    assert re.search(r"humaneval:2 0 diverges at token \d", capsys.readouterr().out)
