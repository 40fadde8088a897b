import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import serve
from mlflow.telemetry import get_telemetry_client
from mlflow.tracking import MlflowClient

from draftlab import tracking
from draftlab.config import TrackingConfig
from draftlab.errors import UserError
from draftlab.tracking import Store


def client_of(store):
    return MlflowClient(tracking_uri=store.uri, registry_uri=store.uri)


def run_of(store, run_id):
    return client_of(store).get_run(run_id)


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "step_100"
    (folder / "draft").mkdir(parents=True)
    (folder / "draft" / "config.json").write_text('{"block_size": 8}')
    (folder / "draft" / "model.safetensors").write_bytes(os.urandom(1000))
    return folder


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


# The store itself


def test_the_default_store_is_made_in_the_outputs_folder_and_nowhere_else(tmp_path, monkeypatch):
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    store = Store(TrackingConfig(), Path("my out's"))
    run_id = store.start_run("a", key="a")
    store.log_table(run_id, [{"x": 1}], "table.csv")
    root = tmp_path / "cwd" / "my out's"
    assert store.uri == f"sqlite:///{root}/mlflow/mlflow.db"
    assert [path.name for path in Path.cwd().iterdir()] == ["my out's"]
    assert sorted(path.name for path in (root / "mlflow").iterdir()) == ["artifacts", "mlflow.db"]
    assert run_of(store, run_id).info.artifact_uri.startswith((root / "mlflow" / "artifacts").as_uri())


def test_an_existing_store_is_opened_again_with_its_runs(store, outputs):
    run_id = store.start_run("a", key="a")
    again = Store(TrackingConfig(), outputs)
    assert again.experiment_id == store.experiment_id
    assert run_of(again, run_id).info.run_name == "a"


def test_the_environment_names_the_store_and_the_config_goes_first(outputs, tmp_path, monkeypatch):
    uri = f"sqlite:///{outputs}/mlflow/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert Store(TrackingConfig(), tmp_path / "unused").uri == uri
    assert not (tmp_path / "unused").exists()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    assert Store(TrackingConfig(uri=uri), tmp_path / "unused").uri == uri


def test_a_relative_sqlite_uri_is_made_absolute(outputs, monkeypatch):
    monkeypatch.chdir(outputs)
    store = Store(TrackingConfig(uri="sqlite:///mlflow/mlflow.db"), outputs)
    assert store.uri == f"sqlite:///{outputs}/mlflow/mlflow.db"


def test_the_ui_command_names_the_store(store):
    assert store.ui_command == f"mlflow ui --backend-store-uri {store.uri}"


LOG_MANY = """
import sys; from pathlib import Path; from draftlab.tracking import Store; from draftlab.config import TrackingConfig
store, worker = Store(TrackingConfig(), Path(sys.argv[1])), int(sys.argv[2])
run_id = store.start_run("trial", key=f"trial {worker}")
for step in range(40):
    store.log_metrics(run_id, {"loss": step * worker, "lr": 0.1}, step)
store.end_run(run_id, "FINISHED")
"""


def test_four_processes_make_one_fresh_store_and_log_to_it_at_once_and_nothing_is_lost(tmp_path):
    workers = [subprocess.Popen([sys.executable, "-c", LOG_MANY, tmp_path, str(worker)]) for worker in range(4)]
    assert [worker.wait(300) for worker in workers] == [0] * 4
    store = Store(TrackingConfig(), tmp_path)
    assert len(client_of(store).search_runs([store.experiment_id])) == 4
    for worker in range(4):
        run_id = store.start_run("", key=f"trial {worker}")
        history = client_of(store).get_metric_history(run_id, "loss")
        assert [(point.step, point.value) for point in history] == [(step, step * worker) for step in range(40)]


BAD_URIS = ("file:///tmp/x", "./mlruns", "http://[broken", "sqlite:////proc/x/mlflow.db", "postgresql://u:pw@[::1]:1/x")


@pytest.mark.parametrize("uri", BAD_URIS)
def test_a_store_that_cant_be_used_is_one_clear_line(uri, tmp_path):
    with pytest.raises(UserError, match="^tracking.uri: [^\n]*$") as refused:
        Store(TrackingConfig(uri=uri), tmp_path)
    assert uri.replace(":pw@", ":***@") in str(refused.value)
    assert "pw" not in str(refused.value)


def test_a_file_that_is_no_database_is_one_clear_line(tmp_path):
    (tmp_path / "notes.db").write_text("not a database " * 100)
    with pytest.raises(UserError, match="notes.db: .*not a database$"):
        Store(TrackingConfig(uri=f"sqlite:///{tmp_path}/notes.db"), tmp_path)


def test_a_deleted_experiment_is_refused(store, outputs):
    client_of(store).delete_experiment(store.experiment_id)
    with pytest.raises(UserError, match="tracking.experiment: 'draftlab' is deleted"):
        Store(TrackingConfig(), outputs)


def test_a_server_that_isnt_there_is_one_clear_line_at_once(tmp_path):
    start, before = time.monotonic(), dict(os.environ)
    with pytest.raises(UserError, match="^tracking.uri: no MLflow store at http://127.0.0.1:1: [^\n]*refused[^\n]*$"):
        Store(TrackingConfig(uri="http://127.0.0.1:1"), tmp_path)
    assert time.monotonic() - start < 12
    assert dict(os.environ) == before


def test_a_server_that_never_answers_is_given_up_within_ten_seconds(tmp_path):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        start, before, uri = time.monotonic(), dict(os.environ), f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(UserError, match=f"^tracking.uri: no MLflow store at {uri}: [^\n]*timed out[^\n]*$"):
            Store(TrackingConfig(uri=uri), tmp_path)
    assert time.monotonic() - start < 12
    assert dict(os.environ) == before


def test_everything_works_through_a_server_too(outputs, checkpoint, tmp_path):
    with serve(f"sqlite:///{outputs}/mlflow/mlflow.db", tmp_path) as url:
        store = Store(TrackingConfig(uri=url), outputs)
        run_id = store.start_run("a", key="a", params={"draft.block_size": 8})
        model_id = store.log_checkpoint(run_id, checkpoint, name="draft", step=1, params={}, metrics={"loss": 2.0})
        store.log_table(run_id, [{"x": 1}], "tables/rows.csv")
        store.end_run(run_id, "FINISHED")
        assert store.start_run("a", key="a") == run_id
        assert files(store.resolve_checkpoint(run_id, tmp_path / "a")) == files(checkpoint)
        assert files(store.resolve_checkpoint(f"models:/{model_id}", tmp_path / "b")) == files(checkpoint)
        assert [found.path for found in client_of(store).list_artifacts(run_id, "tables")] == ["tables/rows.csv"]
        assert store.ui_command.startswith(f"{url}/#/experiments/{store.experiment_id}/runs")


def test_mlflow_sends_no_telemetry():
    assert get_telemetry_client() is None
    code = "import draftlab.tracking; from mlflow.telemetry import get_telemetry_client as get; assert get() is None"
    unset = {"MLFLOW_DISABLE_TELEMETRY", "DO_NOT_TRACK", "CI", "PYTEST_CURRENT_TEST"}
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


# Runs


def test_a_child_run_names_its_parent_and_carries_params_versions_and_owner(store):
    parent = store.start_run("sweep", key="sweep")
    params, tags = {"draft.block_size": 8}, {"note": "x"}
    child = store.start_run("trial", key="sweep/trial", parent=parent, params=params, tags=tags)
    data = run_of(store, child).data
    assert data.tags["mlflow.parentRunId"] == parent
    assert data.params == {"draft.block_size": "8"}
    assert data.tags["note"] == "x"
    assert data.tags["draftlab.pid"] == str(os.getpid())
    assert data.tags["draftlab.host"] == socket.gethostname()
    assert {"mlflow.user", "draftlab.version", "draftlab.torch", "draftlab.ray", "draftlab.mlflow"} <= set(data.tags)


def test_git_state_is_recorded_from_the_packages_own_repository(tmp_path, monkeypatch):
    def git(*command):
        subprocess.run(["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", *command], check=True)

    git("init", "-q")
    (tmp_path / "module.py").write_text("x = 1")
    monkeypatch.setattr(tracking, "__file__", str(tmp_path / "module.py"))
    tracking._provenance.cache_clear()
    assert "draftlab.git_dirty" not in tracking._provenance()  # not tracked: not our repository
    git("add", "module.py")
    git("commit", "-q", "-m", "one")
    tracking._provenance.cache_clear()
    tags = tracking._provenance()
    head = subprocess.run(["git", "-C", tmp_path, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    assert (tags["mlflow.source.git.commit"], tags["draftlab.git_dirty"]) == (head, "false")
    (tmp_path / "module.py").write_text("x = 2")
    tracking._provenance.cache_clear()
    assert tracking._provenance()["draftlab.git_dirty"] == "true"
    tracking._provenance.cache_clear()


def test_a_key_continues_its_run_and_another_key_starts_one(store):
    first = store.start_run("trial", key="out's/trial \"8\"", params={"steps": 10})
    store.end_run(first, "KILLED", "interrupted")
    assert run_of(store, first).data.tags["draftlab.reason"] == "interrupted"
    again = store.start_run("trial", key="out's/trial \"8\"", params={"steps": 10})
    other = store.start_run("trial", key="out's/trial '8'", params={"steps": 10})
    assert again == first != other
    run = run_of(store, again)
    assert run.info.status == "RUNNING"
    assert not {"draftlab.reason", "draftlab.params_changed"} & set(run.data.tags)


def test_a_run_that_nothing_continues_is_one_of_its_own_under_the_same_name(store):
    ids = []
    for value in (1, 2):
        with store.run("acceptance", {"value": value}) as run_id:
            ids.append(run_id)
    runs = [run_of(store, run_id) for run_id in ids]
    assert [run.data.params["value"] for run in runs] == ["1", "2"] and ids[0] != ids[1]
    assert [run.info.status for run in runs] == ["FINISHED"] * 2


def test_params_stay_as_first_written_and_a_difference_is_tagged(store):
    run_id = store.start_run("trial", key="trial", params={"steps": 10, "lr": 1e-3})
    store.start_run("trial", key="trial", params={"steps": 20, "lr": 1e-3, "new": 1})
    data = run_of(store, run_id).data
    assert data.params == {"steps": "10", "lr": "0.001", "new": "1"}
    assert data.tags["draftlab.params_changed"] == "steps: 10 -> 20"


def test_more_and_longer_params_than_mlflow_takes_at_once_are_kept_and_cut_visibly(store):
    params = {f"p{index}": index for index in range(250)} | {"long": "x" * 10_000, "none": None}
    run_id = store.start_run("a", key="a", params=params)
    kept = run_of(store, run_id).data.params
    assert len(kept) == 252 and kept["p249"] == "249" and kept["none"] == "None"
    assert len(kept["long"]) == 6000 and kept["long"].endswith("...")
    store.start_run("a", key="a", params=params)
    assert "draftlab.params_changed" not in run_of(store, run_id).data.tags


def test_a_reason_longer_than_a_tag_is_cut(store):
    run_id = store.start_run("a", key="a")
    store.end_run(run_id, "FAILED", "x" * 20_000)
    run = run_of(store, run_id)
    assert run.info.status == "FAILED" and run.info.end_time
    assert run.data.tags["draftlab.reason"].endswith("x...")


# Metrics and data


def test_metrics_are_logged_by_step(store):
    run_id = store.start_run("a", key="a")
    for step in (0, 10, 20):
        store.log_metrics(run_id, {"loss": 5 - step / 10, "lr": 0.1}, step)
    history = client_of(store).get_metric_history(run_id, "loss")
    assert [(point.step, point.value) for point in history] == [(0, 5.0), (10, 4.0), (20, 3.0)]


def test_more_metrics_than_one_request_takes_are_all_logged(store):
    run_id = store.start_run("a", key="a")
    store.log_metrics(run_id, {f"m{index}": index for index in range(1500)})
    assert len(run_of(store, run_id).data.metrics) == 1500


def test_values_that_are_not_finite_are_tagged_and_hide_nothing(store):
    run_id = store.start_run("a", key="a")
    store.log_metrics(run_id, {"loss": 2.0, "grad_norm": 1.0}, 1)
    store.log_metrics(run_id, {"loss": float("nan"), "grad_norm": float("inf"), "lr": 0.1}, 2)
    data = run_of(store, run_id).data
    assert data.metrics == {"loss": 2.0, "grad_norm": 1.0, "lr": 0.1}
    assert data.tags["draftlab.nonfinite"] == "step 2: loss=nan, grad_norm=inf"
    assert len(client_of(store).search_runs([store.experiment_id], "metrics.loss > 0")) == 1


def test_a_dataset_is_an_input_of_the_run(store):
    run_id = store.start_run("a", key="a")
    store.log_dataset(run_id, "corpus", "0123456789ab", "packaged", "training")
    store.log_metrics(run_id, {"acceptance_length": 2.0}, dataset=("corpus", "0123456789ab"))
    (given,) = run_of(store, run_id).inputs.dataset_inputs
    assert (given.dataset.name, given.dataset.digest, given.tags[0].value) == ("corpus", "0123456789ab", "training")
    (point,) = client_of(store).get_metric_history(run_id, "acceptance_length")
    assert point.value == 2.0


def test_files_folders_and_tables_are_kept_with_the_run(store, tmp_path):
    run_id = store.start_run("a", key="a")
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "a.png").write_bytes(b"png")
    (tmp_path / "run.yaml").write_text("seed: 0")
    store.log_artifacts(run_id, tmp_path / "figures", "figures")
    store.log_artifacts(run_id, tmp_path / "run.yaml")
    store.log_table(run_id, [{"prompt": 0, "length": 2.5}], "eval/prompts.csv")
    store.log_table(run_id, [{"prompt": 0, "length": 2.5}, {"prompt": 1, "length": None}], "eval/prompts.csv")
    kept = files(client_of(store).download_artifacts(run_id, "", str(tmp_path)))
    assert kept["figures/a.png"] == b"png" and kept["run.yaml"] == b"seed: 0"
    assert kept["eval/prompts.csv"] == b"prompt,length\n0,2.5\n1,\n"


# Checkpoints


def test_a_checkpoint_comes_back_by_run_id_model_id_version_and_alias(store, checkpoint, tmp_path):
    run_id = store.start_run("a", key="a")
    metrics, params = {"acceptance_length": 2.25}, {"draft.block_size": 8}
    model_id = store.log_checkpoint(run_id, checkpoint, name="draft", step=100, params=params, metrics=metrics)
    client = client_of(store)
    client.create_registered_model("draft")
    client.create_model_version("draft", client.get_logged_model(model_id).artifact_location, run_id)
    client.set_registered_model_alias("draft", "champion", "1")
    for index, ref in enumerate([run_id, f"models:/{model_id}", "models:/draft/1", "models:/draft@champion"]):
        assert files(store.resolve_checkpoint(ref, tmp_path / str(index))) == files(checkpoint), ref


def test_a_checkpoints_metrics_and_params_are_linked_to_it(store, checkpoint):
    run_id = store.start_run("a", key="a")
    params = {"draft.block_size": 8, "long": "x" * 10_000}
    model_id = store.log_checkpoint(
        run_id, checkpoint, name="draft", step=100, params=params, metrics={"loss": 2.0, "bad": float("nan")}
    )
    store.log_metrics(run_id, {"speedup": 1.5}, 100, model_id=model_id)
    model = client_of(store).get_logged_model(model_id)
    linked = {metric.key: (metric.value, metric.step) for metric in model.metrics}
    assert linked == {"loss": (2.0, 100), "speedup": (1.5, 100)}
    assert (model.source_run_id, model.params["draft.block_size"], model.status) == (run_id, "8", "READY")
    run = run_of(store, run_id)
    assert run.data.metrics == {"loss": 2.0, "speedup": 1.5}
    assert [(output.model_id, output.step) for output in run.outputs.model_outputs] == [(model_id, 100)]


def test_the_same_checkpoint_is_kept_once_and_a_later_one_is_what_the_run_resolves_to(store, checkpoint, tmp_path):
    run_id = store.start_run("a", key="a")

    def log(name, step):
        return store.log_checkpoint(run_id, checkpoint, name=name, step=step, params={}, metrics={})

    later = log("draft-200", 200)
    assert log("draft-200", 200) == later
    early = log("draft-100", 100)
    (checkpoint / "draft" / "config.json").write_text('{"block_size": 9}')
    changed = log("draft-200", 200)
    assert len({later, early, changed}) == 3
    assert files(store.resolve_checkpoint(run_id, tmp_path / "got"))["draft/config.json"] == b'{"block_size": 9}'


def test_a_checkpoint_may_be_called_like_any_trial(store, checkpoint):
    run_id = store.start_run("a", key="a")
    name = "target.model='a/b:1' lr=6e-4 50%"
    model_id = store.log_checkpoint(run_id, checkpoint, name=name, step=1, params={}, metrics={})
    assert store.log_checkpoint(run_id, checkpoint, name=name, step=1, params={}, metrics={}) == model_id
    assert client_of(store).get_logged_model(model_id).name == "target_model=_a_b_1_ lr=6e-4 50_"


def test_a_checkpoint_that_couldnt_be_kept_is_never_resolved(store, checkpoint, tmp_path):
    run_id = store.start_run("a", key="a")
    artifacts = tmp_path / "outputs" / "mlflow" / "artifacts"
    artifacts.parent.mkdir(exist_ok=True)
    artifacts.write_text("a file where the folder should be")
    with pytest.raises(OSError):
        store.log_checkpoint(run_id, checkpoint, name="draft", step=1, params={}, metrics={})
    with pytest.raises(UserError, match=f"run {run_id} .a. has no checkpoint"):
        store.resolve_checkpoint(run_id, tmp_path / "got")


@pytest.mark.parametrize("ref", ["0" * 32, "models:/m-" + "0" * 32, "models:/draft/1", "models:/draft@champion"])
def test_a_reference_to_nothing_is_one_clear_line(store, ref, tmp_path):
    with pytest.raises(UserError, match=f"^checkpoint '{ref}': [^\n]*$"):
        store.resolve_checkpoint(ref, tmp_path)


@pytest.mark.parametrize("ref", ["outputs/ckpt", "z-lab/Qwen3-8B-DFlash-b16", "/abs/folder", "."])
def test_folders_and_hub_ids_are_no_references(store, ref, tmp_path):
    assert store.resolve_checkpoint(ref, tmp_path) is None


# Crashes


TWO_RUNS = """
import sys, time
from pathlib import Path
from draftlab.config import TrackingConfig
from draftlab.tracking import Store
store = Store(TrackingConfig(uri=sys.argv[1]), Path())
sweep = store.start_run("sweep", key="x")
print(sweep, store.start_run("trial", key="x/1", parent=sweep), flush=True)
time.sleep(100)
"""


def _process_with_two_runs(store):
    command = [sys.executable, "-c", TWO_RUNS, store.uri]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    return process, process.stdout.readline().split()


def test_runs_of_a_process_that_was_killed_are_ended_and_others_are_left_alone(store):
    process, lost = _process_with_two_runs(store)
    mine = store.start_run("mine", key="mine")
    assert store.reconcile() == 0
    process.send_signal(signal.SIGKILL)
    time.sleep(0.5)
    assert process.returncode is None  # nobody has waited for it: it is a zombie now
    assert store.reconcile() == 2
    process.wait()
    for run_id in lost:
        run = run_of(store, run_id)
        assert run.info.status == "KILLED" and run.data.tags["draftlab.reason"] == "its process is gone"
    assert run_of(store, mine).info.status == "RUNNING"
    assert store.reconcile() == 0


def test_a_process_with_the_same_pid_is_not_taken_for_the_owner(store):
    run_id = store.start_run("a", key="a")
    client_of(store).set_tag(run_id, "draftlab.started", "1000000000")
    assert store.reconcile() == 1


def test_runs_of_other_machines_end_with_their_parent_only(store):
    parent = store.start_run("sweep", key="x")
    child = store.start_run("trial", key="x/1", parent=parent)
    for run_id in (parent, child):
        client_of(store).set_tag(run_id, "draftlab.host", "another-machine")
    assert store.reconcile() == 0
    store.end_run(parent, "FAILED", "its driver said so")
    assert store.reconcile() == 1
    assert run_of(store, child).info.status == "KILLED"


def test_runs_that_draftlab_didnt_make_are_left_alone(store):
    foreign = client_of(store).create_run(store.experiment_id).info.run_id
    assert store.reconcile() == 0
    assert run_of(store, foreign).info.status == "RUNNING"
