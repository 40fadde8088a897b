"""A sweep's folder, whole and damaged."""

import json
import shutil

import pytest

from draftlab import records
from draftlab.errors import UserError
from draftlab.records import FINISHED, RUNNING, TRAINED, Plan, Record


@pytest.fixture
def plan(tiny_run):
    return Plan(
        experiment="sweep_decay", question="Which?", key="k", vary={"loss.gamma": [1, float("inf")]}, baseline=None,
        base=tiny_run, tracking_uri="sqlite:////x.db", mlflow_run_id="0" * 32, prepared={"target": "a", "corpus": "b"},
    )  # fmt: skip


@pytest.mark.parametrize("vary", [{}, {"layers": {"late_2": {"draft.num_target_layers": 2}, "0_2": {}}}])
def test_a_plan_is_read_as_it_was_written(plan, tmp_path, vary):
    probe = {"draft.variant": "gated", "draft.target_layer_ids": [0, 2]}
    plan = plan.model_copy(update={"vary": plan.vary | vary, "probe": probe, "proposed": [2, 0]})
    records.save_plan(tmp_path, plan)
    assert records.load_plan(tmp_path) == plan


@pytest.mark.parametrize(
    "damage",
    ["", "x", "[1]", "{", "base: {train: {stepz: 3}}", "\0", "vary: [1, 2]", "vary: {a.b: 7}", "vary: {a: {b: 1}}"],
)
def test_a_damaged_plan_is_one_line(plan, tmp_path, damage):
    records.save_plan(tmp_path, plan)
    path = tmp_path / "sweep.yaml"
    whole = path.read_text()
    if damage.startswith("vary"):
        start = whole.index("vary:")
        damage = whole[:start] + damage + "\n" + whole[whole.index("baseline:") :]
    path.write_text(damage)
    with pytest.raises(UserError, match="sweep.yaml is damaged") as caught:
        records.load_plan(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_plan_is_no_sweep(tmp_path):
    with pytest.raises(UserError, match="no sweep there"):
        records.load_plan(tmp_path)


def test_a_sweep_is_worked_on_by_one_process_at_a_time(tmp_path):
    with records.alone(tmp_path):
        with pytest.raises(UserError, match="another process"):
            with records.alone(tmp_path):
                pass
    with records.alone(tmp_path):
        pass


def test_a_lock_that_is_a_folder_is_refused(tmp_path):
    (tmp_path / ".lock").mkdir()
    with pytest.raises(UserError, match="can't be locked"):
        with records.alone(tmp_path):
            pass


@pytest.fixture
def finished(swept, tmp_path):
    """A copy of a trial that is done."""
    return shutil.copytree(swept.folder / "trials" / "block_size_2", tmp_path / "block_size_2")


def test_a_finished_trial_is_read_with_its_results_and_traces(finished):
    record = Record(finished)
    assert record.status == FINISHED and record.run_id and record.draft.is_dir()
    assert [report["step"] for report in record.reports()] == [6, 12]
    found, pairs = record.results(), record.pairs()
    committed = sum(each.committed for pair in pairs for each in pair.draft.rounds)
    rounds = sum(len(pair.draft.rounds) for pair in pairs)
    assert found.metrics["acceptance_length"] == pytest.approx(committed / rounds)


@pytest.mark.parametrize(
    "damage", [None, "", "{", "[]", "null", '{"status": "RUNNING"}', '{"run_id": 3, "status": "x"}']
)
def test_a_trial_whose_state_is_damaged_is_as_if_it_had_never_begun(finished, damage):
    path = finished / "trial.json"
    path.unlink() if damage is None else path.write_text(damage)
    assert Record(finished).status is None


@pytest.mark.parametrize("file", ["results.json", "traces.jsonl"])
@pytest.mark.parametrize("damage", [None, "{", "[]", '{"block_size_2": {}}'])
def test_a_trial_whose_results_are_damaged_is_decoded_again(finished, file, damage):
    path = finished / "evaluation" / file
    path.unlink() if damage is None else path.write_text(damage)
    record = Record(finished)
    assert record.status == TRAINED and record.results() is None


def test_a_trial_whose_draft_is_lost_too_is_trained_again(finished):
    (finished / "evaluation" / "results.json").unlink()
    (finished / "draft" / "model.safetensors").unlink()
    assert Record(finished).status is None


def test_reports_survive_a_driver_that_was_killed_while_it_wrote(tmp_path):
    record = Record(tmp_path / "a")
    assert record.reports() == []
    record.change(status=RUNNING, run_id="r")
    record.add_report(5, {"loss": 2.0})
    record.add_report(10, {"loss": 1.0})
    record.add_report(15, {"loss": 0.5})
    record.add_report(10, {"loss": 1.5})
    with (tmp_path / "a" / "reports.jsonl").open("a") as file:
        file.write('[1]\n{"loss": 3}\n{"step": 15, "lo')
    assert [(report["step"], report["loss"]) for report in record.reports()] == [(5, 2.0), (10, 1.5)], (
        "what followed the step from which it went on is lost"
    )
    assert json.loads((tmp_path / "a" / "trial.json").read_text()) == {"status": "RUNNING", "run_id": "r"}
