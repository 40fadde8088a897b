"""The scripts that train, whole, on the tiny target: to the end, stopped, killed, resumed, and refused."""

import json
import os
import re
import signal
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from mlflow import MlflowClient

from draftlab import checkpoint, cli, config, records, sweep
from draftlab.errors import UserError
from experiments import (
    ablate_anchors,
    ablate_conditioning,
    compare_family,
    data_scaling,
    sweep_block_size,
    sweep_decay,
    sweep_depth,
    sweep_joint,
    sweep_losses,
    sweep_target_layers,
    sweep_vocab,
)
from experiments import train as train_script

ROOT = Path(__file__).resolve().parents[1]
TINY = ["--config", str(config.CONFIGS / "tiny.yaml"), "cluster.cpus=2"]


@pytest.fixture
def tracked(outputs):
    """The override that names the test's own tracking store, and a client of it."""
    uri = f"sqlite:///{outputs}/mlflow/mlflow.db"
    return f"tracking.uri={uri}", MlflowClient(uri)


def runs_of(client):
    """name -> run, of all in the store."""
    experiment = client.get_experiment_by_name("draftlab")
    return {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}


def test_a_sweep_of_block_sizes_ends_in_a_table_figures_and_tracked_runs(swept, capsys):
    out, said, client = swept.folder, swept.said, MlflowClient(swept.tracking_uri)

    frame = pd.read_csv(out / "results.csv")
    assert list(frame["block_size"]) == [2, 4] and list(frame["gamma"]) == [1, 2]
    assert set(frame["status"]) == {"FINISHED"} and frame["reason"].isna().all()
    assert (frame["acceptance_length"] >= 1).all() and (frame["acceptance_length"] <= frame["block_size"]).all()
    times = ["draft_ms", "verify_ms", "target_ms", "train_seconds"]
    assert (frame[["speedup", "supervised_tokens", *times]] > 0).all().all()
    assert (frame["divergences"] == 0).all()  # float32
    for name in ("acceptance.png", "survival.png", "training.png", "latency.png", "verdicts.png"):
        assert (out / name).stat().st_size > 5_000
    for row in frame.itertuples():
        draft, info = checkpoint.load(Path(row.checkpoint))
        assert draft.spec.block_size == row.block_size == info.run.draft.block_size

    runs = runs_of(client)
    parent = runs.pop(f"sweep_block_size {out.name}")
    assert sorted(runs) == ["block_size_2", "block_size_4"]
    assert parent.data.params["sweep.draft.block_size"] == "[2, 4]" and "draft.block_size" not in parent.data.params
    assert {path.path for path in client.list_artifacts(parent.info.run_id)} >= {"results.csv", "acceptance.png"}
    for row in frame.itertuples():
        run = runs[row.trial]
        assert (run.info.run_id, run.data.tags["mlflow.parentRunId"]) == (row.mlflow_run_id, parent.info.run_id)
        assert run.data.params["draft.block_size"] == str(row.block_size)
        assert run.data.metrics["acceptance_length"] == pytest.approx(row.acceptance_length)
        steps = [metric.step for metric in client.get_metric_history(run.info.run_id, "loss")]
        assert {6, 12} <= set(steps)
        assert len(run.outputs.model_outputs) == 1
        assert {data.dataset.name for data in run.inputs.dataset_inputs} == {"corpus", "prompts"}
    assert {run.info.status for run in (parent, *runs.values())} == {"FINISHED"}

    assert "block_size_2: step 12/12" in said and "best by speedup: block_size_" in said
    assert said.splitlines()[-1].endswith(f"mlflow ui --backend-store-uri {client.tracking_uri}")

    # Resumed when all is done: nothing is trained or decoded again.
    assert sweep_block_size.main(["--resume", str(out)]) == 0
    assert "starting Ray" not in capsys.readouterr().out
    pd.testing.assert_frame_equal(pd.read_csv(out / "results.csv"), frame)
    assert {run.info.status for run in runs_of(client).values()} == {"FINISHED"}


def test_a_run_goes_on_after_sigterm_and_leaves_none_running(tmp_path, tracked):
    """All is put away, and how to go on is told. SIGKILL: the next test."""
    override, client = tracked
    out = tmp_path / "out"
    script = [sys.executable, str(ROOT / "experiments" / "train.py")]
    begin = [*TINY, override, "--out", str(out), "train.steps=200", "train.eval_every=10"]

    driver = until(r"step [2-9]\d/", [*script, *begin])
    driver.send_signal(signal.SIGTERM)
    said, _ = driver.communicate(timeout=60)
    assert driver.returncode == 130
    assert f"go on with --resume {out}" in said and "Traceback" not in said
    assert {run.info.status for run in runs_of(client).values()} == {"KILLED"}
    assert steps_of(out)[-1] < 200

    assert train_script.main(["--resume", str(out)]) == 0
    runs = runs_of(client)
    assert {run.info.status for run in runs.values()} == {"FINISHED"} and len(runs) == 2
    assert not any("draftlab.reason" in run.data.tags for run in runs.values())
    steps = steps_of(out)
    assert steps[-1] == 200
    # It went on from the last checkpoint: what came after that is all that was done twice.
    assert sum(later <= earlier for earlier, later in zip(steps, steps[1:])) <= 1
    assert all(later - earlier > -20 for earlier, later in zip(steps, steps[1:]))
    frame = pd.read_csv(out / "results.csv")
    assert list(frame["status"]) == ["FINISHED"] and frame.loc[0, "acceptance_length"] >= 1


def test_a_gate_proposes_layers_to_the_trials_after_it_also_if_the_driver_is_killed_between(tmp_path, tracked):
    override, client = tracked
    out = tmp_path / "out"
    script = [sys.executable, str(ROOT / "experiments" / "sweep_target_layers.py")]
    begin = [*TINY, override, "--out", str(out), "--layers", "gate 1; uniform 1", "--baseline", "uniform_1"]
    driver = until(r"gate_1: step [2-9]\d/", [*script, *begin, "train.steps=80", "train.eval_every=10"])
    driver.kill()
    driver.communicate(timeout=60)
    plan = records.load_plan(out)
    assert sorted(plan.proposed) == [0, 1, 2]
    before = steps_of(out, "gate")
    assert before[-1] == 80
    assert "RUNNING" in {run.info.status for run in runs_of(client).values()}  # nothing could be put away

    assert sweep_target_layers.main(["--resume", str(out)]) == 0
    assert steps_of(out, "gate") == before  # what had ended was not trained again
    steps = steps_of(out, "gate_1")
    assert steps[-1] == 80 and sum(later <= earlier for earlier, later in zip(steps, steps[1:])) <= 1
    assert all(later - earlier > -20 for earlier, later in zip(steps, steps[1:]))
    frame = pd.read_csv(out / "results.csv").set_index("trial")
    assert list(frame.index) == ["gate", "gate_1", "uniform_1"] and set(frame["status"]) == {"FINISHED"}

    # One finished run a trial, the retrained draft is a plain one with the layer that the gate puts first.
    runs = runs_of(client)
    assert len(runs) == len(client.search_runs([client.get_experiment_by_name("draftlab").experiment_id])) == 4
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    assert not any("draftlab.params_changed" in run.data.tags for run in runs.values())
    gate, _ = checkpoint.load(out / "trials" / "gate" / "draft")
    assert gate.spec.variant == "gated" and gate.spec.target_layer_ids == (0, 1, 2)
    assert gate.layer_order() == plan.proposed == records.load_plan(out).proposed
    draft, _ = checkpoint.load(out / "trials" / "gate_1" / "draft")
    assert draft.spec.variant == "dflash" and draft.spec.target_layer_ids == tuple(plan.proposed[:1])
    assert runs["gate_1"].data.params["draft.target_layer_ids"] == str(plan.proposed[:1])

    # The gate itself is no answer, but its shares are shown with the verdict.
    assert list(pd.read_csv(out / "gate.csv")["layer"]) == plan.proposed
    verdicts = pd.read_csv(out / "verdicts.csv").set_index("arm")["verdict"]
    assert set(verdicts.index) == {"gate_1", "uniform_1"} and verdicts["uniform_1"] == "baseline"
    page = (out / "report.md").read_text()
    said = rf"The gate proposes layer {plan.proposed[0]} \(gate_1\); against uniform_1 .*: {verdicts['gate_1']}\."
    assert re.search(said, page) and "![gate.png](gate.png)" in page
    parent = runs[f"sweep_target_layers {out.name}"].info.run_id
    assert {path.path for path in client.list_artifacts(parent)} >= {"gate.csv", "gate.png"}

    # An ended sweep can be reported once more without its drafts.
    shutil.rmtree(gate_folder := out / "trials" / "gate" / "draft")
    assert sweep_target_layers.main(["--resume", str(out)]) == 0 and not gate_folder.exists()


def test_the_family_is_compared_for_equal_time_and_decoded_at_other_block_sizes_too(tmp_path, tracked):
    override, client = tracked
    out = tmp_path / "out"
    variants = ["--variants", "dflare:4,dspark:3", "--baseline", "dflare_4", "--seeds", "0", "train.seconds=2"]
    sizes = ["--decode-sizes", "2,4", "--rank-by", "acceptance_length"]
    assert compare_family.main([*TINY, override, "--out", str(out), *variants, *sizes]) == 0
    frame = pd.read_csv(out / "results.csv").set_index("variant")
    assert list(frame.index) == ["dflare_4", "dspark_3"] and set(frame["status"]) == {"FINISHED"}
    assert list(frame["block_size"]) == [4, 3] and set(frame["drafted_tokens"]) == {3}
    assert (frame["train_seconds"] >= 2).all() and (frame["divergences"] == 0).all()
    assert (out / "trials" / "dflare_4" / "evaluation" / "layer_mix.png").is_file()

    # Every draft at every size, in a table, a picture, the page and MLflow; the verdicts are of each one's own size.
    table = pd.read_csv(out / "block_sizes.csv").set_index(["draft", "block_size"])
    assert set(table.index) == {(name, size) for name in frame.index for size in (2, 3, 4)}
    verdicts = pd.read_csv(out / "verdicts.csv").set_index("arm")
    assert verdicts.loc["dflare_4", "verdict"] == "baseline"
    runs = runs_of(client)
    for name, row in frame.iterrows():
        own = table.loc[(name, row["block_size"]), "acceptance_length"]
        assert own == pytest.approx(row["acceptance_length"]) == pytest.approx(verdicts.loc[name, "value"])
        values = runs[name].data.metrics
        assert values["b2/acceptance_length"] == pytest.approx(table.loc[(name, 2), "acceptance_length"])
        assert f"b{row['block_size']}/acceptance_length" not in values
    page = (out / "report.md").read_text()
    assert "decoded b =" in page and "![block_sizes.png](block_sizes.png)" in page
    parent = runs[f"compare_family {out.name}"].info.run_id
    assert {path.path for path in client.list_artifacts(parent)} >= {"block_sizes.csv", "block_sizes.png"}


def test_a_joint_search_stops_the_weak_early_and_goes_on_where_it_was(tmp_path, tracked, capsys):
    """Two at once on two cores: the third and the fourth only start if the stopped one's core came back."""
    override, client = tracked
    out = tmp_path / "out"
    begin = [*TINY, override, "--out", str(out), "--scheduler", "asha", "--samples", "3", "--max-concurrent", "2"]
    values = ["--block-sizes", "2,4", "--gammas", "1,inf", "--layers", "1", "--depths", "1,2"]
    rungs = ["search.grace=0.1", "train.steps=20", "train.eval_every=2"]
    fair = ["--budget", "tokens", "--rank-by", "acceptance_length"]
    assert sweep_joint.main([*begin, *values, *rungs, *fair]) == 0
    frame = pd.read_csv(out / "results.csv")
    assert len(frame) == frame["trial"].nunique() == 3
    stopped = frame[frame["status"] == "STOPPED"]
    finished = frame[frame["status"] == "FINISHED"]
    assert len(stopped) + len(finished) == 3 and len(finished) >= 1
    assert (stopped["reason"].str.fullmatch(r"stopped at \d+%: its held-out acceptance fell behind")).all()
    assert stopped["acceptance_length"].isna().all() and finished["acceptance_length"].notna().all()

    runs = runs_of(client)
    parent = runs.pop(f"sweep_joint {out.name}")
    assert {run.info.status for run in (parent, *runs.values())} == {"FINISHED"}
    for row in frame.itertuples():
        run = runs[row.trial]
        assert run.data.tags["draftlab.status"] == row.status and run.data.tags["draftlab.sweep"] == out.name
        assert run.data.params["train.anchors"] == {2: "12", 4: "4"}[row.block_size]
    assert {path.path for path in client.list_artifacts(parent.info.run_id)} >= {
        "report.md", "verdicts.csv", "verdicts.png", "heat_map.png", "latency.png", "results.csv",
    }  # fmt: skip
    page = (out / "report.md").read_text()
    assert page.startswith(f"# sweep_joint {out.name}") and "**Which block size, decay," in page
    assert "By acceptance length, " in page and "By acceptance length, " in capsys.readouterr().out
    assert ("Not measured: " in page) == bool(len(stopped)) and all(arm in page for arm in stopped["arm"])

    # A trial whose records are lost is decoded again, the rest is kept.
    best = finished.iloc[0]["trial"]
    (out / "trials" / best / "evaluation" / "results.json").write_text("{")
    assert sweep_joint.main(["--resume", str(out)]) == 0
    said = capsys.readouterr().out
    assert "starting Ray" not in said and "with 1 drafts" in said
    assert {run.info.status for run in runs_of(client).values()} == {"FINISHED"}


def test_trials_that_fail_say_why_and_the_others_finish(tmp_path, tracked):
    """One whose loss is no longer finite, one that needs more memory than it may have, one whose gate fails."""
    override, client = tracked
    cases = {"fine": {"train.lr": 3e-3}, "diverges": {"train.lr": 1e30}, "greedy": {"train.anchors": 20_000_000}}
    cases |= {"gated": {"draft.layer_choice": "gate"}}
    run = config.load(TINY[1], [*TINY[2:], override, "cluster.max_concurrent=2", "cluster.worker_memory_gb=4"])
    probe = {"draft.variant": "gated", "train.lr": 1e30}
    question = sweep.Question("failures", "What happens?", {"case": cases}, probe=probe)
    said = []
    assert sweep.start(question, run, tmp_path / "out", lambda text, doing=None: said.append(text)) == 1
    assert any(re.match(r"MEMORY: the largest trials are expected to need \d{3,}\.\d GB", text) for text in said)
    frame = pd.read_csv(tmp_path / "out" / "results.csv").set_index("trial")
    lost = frame[frame["status"] == "FAILED"]["reason"]
    assert set(lost.index) == {"gate", "diverges", "greedy", "gated"} and frame.loc["fine", "status"] == "FINISHED"
    assert "FloatingPointError" in lost["diverges"] and "memory" in lost["greedy"].lower()
    assert "FloatingPointError" in lost["gate"] and lost["gated"] == "gate proposed no layers"
    assert "Not measured: diverges, greedy, gated." in (tmp_path / "out" / "report.md").read_text()
    runs = runs_of(client)
    assert runs["failures out"].info.status == "FAILED" and "gated" not in runs  # it never began
    for row in frame.drop("gated").itertuples():
        run = runs[row.Index]
        reason = run.data.tags.get("draftlab.reason")
        assert run.info.status == row.status and (reason == row.reason or reason is None and pd.isna(row.reason))


SCRIPTS = {
    ablate_anchors: (2, []),
    ablate_conditioning: (2, []),
    compare_family: (6, []),
    data_scaling: (2, ["--conversations", "4,8"]),
    sweep_decay: (14, ["--seeds", "0,1"]),
    sweep_depth: (2, ["--depths", "1,2"]),
    sweep_joint: (16, ["--layers", "1"]),
    sweep_losses: (9, []),
    sweep_target_layers: (4, ["--layers", "uniform 1; gate 2; 0, 2"]),
    sweep_vocab: (4, ["--vocabs", "32,full", "--seeds", "0,1"]),
}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_a_dry_run_shows_the_trials_and_their_cost_and_does_nothing(script, tmp_path, tracked, capsys):
    count, arguments = SCRIPTS[script]
    override, client = tracked
    assert script.main([*TINY, override, "--out", str(tmp_path / "out"), "--dry-run", *arguments]) == 0
    said = capsys.readouterr().out
    assert re.search(rf"\b{count} trials, 1 at once: about \d+ minutes of training, [\d.]+ GB of memory, ", said), said
    assert not (tmp_path / "out").exists() and client.get_experiment_by_name("draftlab") is None


@pytest.mark.parametrize(
    "wrong, complaint",
    [
        (
            "eval.schedule=confidence",
            "trial num_hidden_layers_1: eval.schedule=confidence: needs draft.confidence=true",
        ),
        ("corpus.max_length=15", "trial num_hidden_layers_1: draft.block_size: expected at most corpus.max_length=15"),
        ("draft.vocab=5", "trial num_hidden_layers_1: loss.top_k: "),
    ],
)
def test_a_dry_run_refuses_what_the_sweep_would(wrong, complaint):
    changes = [wrong, "draft.block_size=16", "loss.topk_kl=1", "features.last_hidden=true"]
    with pytest.raises(UserError, match=complaint):
        sweep_depth.main([*TINY, *changes, "--dry-run"])


def test_a_joint_grid_has_all_combinations_whatever_the_script_samples_else(capsys):
    few = ["--block-sizes", "4,8", "--gammas", "4,7", "--layers", "1", "--depths", "1"]
    assert sweep_joint.main([*TINY, "--search", "grid", *few, "--dry-run"]) == 0
    assert "4 trials, 1 at once" in capsys.readouterr().out


def test_variants_may_have_another_block_size():
    name, settings = compare_family.variant("dspark:15")
    assert name == "dspark_15" and settings == compare_family.VARIANTS["dspark"] | {"draft.block_size": 15}
    for wrong in ("dspak", "dspark:", "dspark:x", ":8", ""):
        with pytest.raises(UserError, match=f"--variants: expected some of dflash, dflare, dspark, .* got '{wrong}'"):
            compare_family.main(["--variants", wrong])


def test_decays_are_gammas_or_dpace():
    assert dict(map(sweep_decay.decay, ("2", "inf", "dpace"))) == {
        "gamma_2": {"loss.positions": "decay", "loss.gamma": 2},
        "gamma_inf": {"loss.positions": "decay", "loss.gamma": float("inf")},
        "dpace": {"loss.positions": "dpace", "loss.gamma": "tied"},
    }
    with pytest.raises(UserError, match="--decays: expected numbers, inf or dpace, got 'fast'"):
        sweep_decay.main(["--decays", "2,fast"])
    with pytest.raises(UserError, match="--decays: gamma_2 stands there twice"):
        sweep_decay.main(["--decays", "2,2.0"])


@pytest.mark.parametrize("text", ["uniform", "5 uniform", "uniform x", ""])
def test_layers_that_are_neither_a_choice_nor_a_list_are_refused(text):
    with pytest.raises(UserError, match="--layers: expected `gate 5`, `uniform 5` or layers like"):
        sweep_target_layers.main(["--layers", text])


def until(pattern, command):
    """Start a script and read until it says so."""
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
    said = []
    for line in driver.stdout:
        said.append(line)
        if re.search(pattern, line):
            return driver
    raise AssertionError(f"{pattern} never came:\n{''.join(said)}")


def steps_of(out, name="draft"):
    lines = (out / "trials" / name / "reports.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["train.stepz=5"], "unknown key 'stepz'"),
        (["train.steps=many"], "train.steps: input should be a valid integer"),
        (["--block-sizes", "4,1"], "draft.block_size: input should be greater than or equal to 2, got 1"),
        (["--block-sizes", "4,x"], "trial block_size_x: override: draft.block_size: input should be a valid integer"),
        (["--block-sizes", "4,8,4"], "trial block_size_4 would be tried twice"),
        (["draft.target_layer_ids=[1,99]"], "99"),
        (["draft.target_layer_ids=[3]"], "last layer"),
        (["train.workers=4"], "4 workers with a core each don't fit, there are 2 cores"),
        (["--config", "nowhere.yaml"], "nowhere.yaml: cannot be read"),
        (["--out", str(ROOT / "tests")], "is there already"),
        (["tracking.uri=http://127.0.0.1:9"], "tracking.uri"),
        (["corpus.source=nowhere.jsonl"], "nowhere.jsonl"),
        (["draft.block_size=8"], "override 'draft.block_size=8': --block-sizes is what sets that here"),
        (["--samples", "4", "search.samples=8"], "override 'search.samples=8': --samples is what sets that here"),
        (["--decode-sizes", "4,1"], "eval.block_sizes.1: input should be greater than or equal to 2, got 1"),
        (["--rank-by", "loss"], "search.rank_by: expected one of acceptance_length"),
        (["--baseline", "0_2"], "search.baseline: expected one of block_size_4, block_size_8, block_size_16; got '0_2"),
        (["--samples", "4"], "search.samples: a grid has all combinations"),
        (["--search", "optuna", "--samples", "4"], "expected search.samples of 1 to 3"),
        (["--seeds", "0,0"], "trial block_size_4-seed_0 would be tried twice"),
        (["eval.thinking=true"], "eval.thinking=True: the chat template of tiny has no thinking mode"),
        (["eval.max_new_tokens=4000"], "held-out prompt 0: prompt of"),
        (["eval.temperature=1e-9"], "expected temperature 0 or >="),
        (["--decode-sizes", "4,4000"], "eval.block_sizes: the draft has 2048 positions, got 4000"),
        (["cluster.address=127.0.0.1:1"], "cluster.address: no Ray at '127.0.0.1:1'"),
    ],
)
def test_a_bad_input_is_one_line_and_exit_code_2_before_anything_is_written(
    arguments, complaint, tmp_path, tracked, capsys
):
    override, client = tracked
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as stopped:
        cli.main(lambda _: sweep_block_size.main([*TINY, override, "--out", str(out), *arguments]))
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert complaint in error and error.startswith("error: ") and error.count("\n") == 1
    assert not out.exists()
    assert client.get_experiment_by_name("draftlab") is None or not runs_of(client)


@pytest.mark.parametrize(
    "layers, complaint",
    [
        ("uniform 1; uniform 40", "trial uniform_40: draft.num_target_layers: a target of 4 layers has 1 to spread"),
        ("gate 40; uniform 1", "trial gate_40: draft.num_target_layers: the gate has 3 layers to choose from, got 40"),
        ("uniform 1; uniforn 1", "trial uniforn_1: override: draft.layer_choice: string should match"),
        ("0,1; 1,3", "trial 1_3: .* the last layer"),
        ("late 1; early 1; late 1", "argument --layers: late_1 stands there twice"),
    ],
)
def test_a_value_that_one_trial_alone_cannot_have_is_refused_at_the_start(layers, complaint, tmp_path, tracked):
    override, client = tracked
    with pytest.raises(UserError, match=complaint):
        sweep_target_layers.main([*TINY, override, "--out", str(tmp_path / "out"), "--layers", layers])
    assert not (tmp_path / "out").exists()
    assert client.get_experiment_by_name("draftlab") is None or not runs_of(client)


@pytest.mark.parametrize("script", [sweep_block_size, train_script])
def test_resume_wants_a_sweep_and_nothing_else(script, tmp_path):
    with pytest.raises(UserError, match="no sweep there"):
        script.main(["--resume", str(tmp_path)])
    for besides in (["train.steps=3"], ["--config", "x.yaml"], ["--out", "x"], ["--samples", "3"], ["--dry-run"]):
        with pytest.raises(UserError, match=f"expected nothing else, got {besides[0]}"):
            script.main(["--resume", str(tmp_path), *besides])


def test_paths_are_kept_absolute(tiny_run, tmp_path, monkeypatch):
    (tmp_path / "corpus.jsonl").touch()
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    run = sweep._anchor(tiny_run.replace({"corpus.source": "corpus.jsonl"}))
    assert run.corpus.source == str(tmp_path / "corpus.jsonl")
    assert run.target.model == "tiny"  # a name, whatever lies here
    with pytest.raises(UserError, match="path ~nouser/corpus.jsonl: expected a known user's home"):
        sweep._anchor(tiny_run.replace({"corpus.source": "~nouser/corpus.jsonl"}))
