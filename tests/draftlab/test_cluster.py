"""Real Ray, the tiny target, all trials in one session: Ray's start and a trial's start cost more than the training."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
import ray
from conftest import free_port
from ray.tune.search import Searcher

from draftlab import cluster, config, train
from draftlab.cluster import METRIC, SCORE, TIME, Node
from draftlab.config import SearchConfig
from draftlab.errors import UserError


class Log:
    """Keeps what the cluster tells, and kills a worker when told to."""

    def __init__(self, kill=None):
        self.kill, self.curves, self.restarts, self.ends, self.order = kill, {}, {}, {}, []
        self.signals = []

    def heard(self, number, _frame):
        self.signals.append(number)

    def started(self, name):
        self.order.append(name)
        self.session = Path(ray.worker.global_worker.node.get_temp_dir_path())

    def reported(self, name, step, metrics):
        self.curves.setdefault(name, {})[step] = metrics
        if name == self.kill:
            self.kill = None
            workers = [p for p in psutil.Process().children(recursive=True) if "RayTrainWorker" in p.name()]
            assert len(workers) == 2
            workers[0].kill()  # the other one meets a lost connection, and raises

    def restarted(self, name, reason):
        self.restarts[name] = reason

    def ended(self, name, failure, stopped):
        self.ends[name] = failure or stopped


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """Four trials on Ray: one worker, two, one whose loss explodes, and two of which one is killed."""
    folder = tmp_path_factory.mktemp("sweep")
    run = config.load(config.CONFIGS / "tiny.yaml").replace({"cluster.cpus": 2, "train.eval_every": 4})
    runs = {
        "one": run,
        "two": run.replace({"train.workers": 2}),
        "explodes": run.replace({"train.lr": 1e30}),
        "killed": run.replace({"train.steps": 40, "train.eval_every": 2, "train.workers": 2}),
    }
    prepared = train.prepare(runs, lambda *_, **__: None)
    log = Log(kill="killed")
    before = {number: signal.signal(number, log.heard) for number in (signal.SIGINT, signal.SIGTERM)}
    cluster.run_trials(runs, prepared, folder, log)
    for number, handler in before.items():
        os.kill(os.getpid(), number)
        signal.signal(number, handler)
    return folder, runs, log, prepared


@pytest.fixture(scope="module")
def head():
    """The address of a Ray cluster with two cores that runs beside us."""
    folder, port = tempfile.mkdtemp(prefix="ray-head-", dir="/tmp"), free_port()
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus=2"]
    start += [f"--port={port}", f"--temp-dir={folder}", "--include-dashboard=false", "--disable-usage-stats"]
    with subprocess.Popen(start, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        said = ""
        while "Ray runtime started" not in said:
            line = process.stdout.readline()
            said += line
            assert line, said
        yield f"127.0.0.1:{port}"
        for each in (*psutil.Process(process.pid).children(recursive=True), process):
            each.kill()  # to end well takes it half a minute
    shutil.rmtree(folder, ignore_errors=True)


def test_one_and_two_workers_have_the_same_loss_curve(session):
    _, runs, log, _ = session
    one, two = log.curves["one"], log.curves["two"]
    assert sorted(one) == sorted(two) == [4, 8, 12]
    for step in one:
        for measure in ("loss", "heldout_acceptance_length", "supervised_tokens"):
            assert two[step][measure] == pytest.approx(one[step][measure], abs=1e-5), (step, measure)


def test_a_ray_train_worker_trains_as_the_loop_alone_does(session, tmp_path):
    _, runs, log, prepared = session
    alone = {}

    def keep(report):
        alone[report.step] = report.metrics

    train.train(runs["one"], prepared, rank=0, world_size=1, report=keep, workdir=tmp_path)
    for step, metrics in log.curves["one"].items():
        assert metrics["loss"] == pytest.approx(alone[step]["loss"], abs=1e-5)


def test_a_trial_that_fails_tells_why_and_stops_no_other(session):
    folder, runs, log, _ = session
    assert log.order == ["killed", "one", "two", "explodes"]  # the one with the most steps first
    assert [log.ends[name] for name in ("one", "two", "killed")] == [None] * 3
    assert "loss" in log.ends["explodes"] and log.ends["explodes"].startswith("FloatingPointError")
    text = (folder / "trials" / "explodes" / "traceback.txt").read_text()
    assert text.startswith("Traceback") and text.strip().endswith(log.ends["explodes"])
    assert "explodes" not in log.restarts  # it would only explode again


def test_a_killed_worker_is_replaced_and_its_trial_goes_on(session):
    folder, runs, log, _ = session
    assert re.fullmatch("worker [01] died: .*", log.restarts["killed"])
    assert max(log.curves["killed"]) == runs["killed"].train.steps
    assert not (folder / "trials" / "killed" / "traceback.txt").exists()


def test_the_last_and_the_best_checkpoint_are_kept(session):
    folder, runs, log, _ = session
    for name in ("one", "two", "killed"):
        path, step, metrics = cluster.best_checkpoint(folder, name)
        scores = {step: metrics[cluster.SCORE] for step, metrics in log.curves[name].items()}
        assert scores[step] == metrics[cluster.SCORE] == max(scores.values())
        kept = {int(each.name.removeprefix("step_")) for each in path.parent.glob("step_*")}
        assert kept == {step, runs[name].train.steps}
        assert (path / "draft" / "model.safetensors").is_file() and (path / "trainer.pt").is_file()


def test_a_trial_without_a_checkpoint_has_no_best_one(session):
    assert cluster.best_checkpoint(session[0], "never_started") is None


def test_ray_leaves_nothing_behind(session):
    used = session[2].session
    assert used.name.startswith("draftlab-ray-") and not used.exists()
    left = [p.name() for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
    assert not [name for name in left if "ray" in name.lower()]


def test_a_running_cluster_is_joined_and_goes_on_without_us(head, tmp_path):
    run = config.load(config.CONFIGS / "tiny.yaml").replace({"cluster.address": head})
    assert cluster.find_shares([run]) == cluster.Shares(concurrent=1, cpus=2, gpus=0.0)
    log = Log()
    cluster.run_trials({"one": run}, train.prepare({"one": run}, lambda *_, **__: None), tmp_path / "sweep", log)
    assert log.ends == {"one": None} and max(log.curves["one"]) == run.train.steps
    path, _, _ = cluster.best_checkpoint(tmp_path / "sweep", "one")
    assert (path / "draft" / "model.safetensors").is_file()
    many = run.replace({"train.workers": 4, "train.batch_size": 4})
    with pytest.raises(UserError, match="train.workers: 4 workers with a core each don't fit, there are 2 cores"):
        cluster.find_shares([run, many])


def test_signals_are_the_drivers_again_when_ray_is_down(session):
    assert session[2].signals == [signal.SIGINT, signal.SIGTERM]


def test_the_cores_are_shared_among_the_workers_that_run_at_once(tiny_run):
    run = tiny_run.replace({"cluster.max_concurrent": 3, "train.workers": 2})
    assert cluster.share(run, 5, [Node(16)]) == cluster.Shares(concurrent=3, cpus=2, gpus=0)
    assert cluster.share(run, 2, [Node(16)]) == cluster.Shares(concurrent=2, cpus=4, gpus=0)
    assert cluster.share(run, 5, [Node(2)]) == cluster.Shares(concurrent=1, cpus=1, gpus=0)


def test_a_resumed_sweeps_last_trial_gets_no_more_cores_than_it_had(tiny_run, tmp_path, monkeypatch):
    class Asked(Exception):
        pass

    def share(run, trials, nodes):
        raise Asked(trials)

    monkeypatch.setattr(cluster, "_ray", lambda _: contextlib.nullcontext([Node(2)]))
    monkeypatch.setattr(cluster, "share", share)
    with pytest.raises(Asked, match="3"):
        cluster.run_trials({"c": tiny_run}, None, tmp_path, None, history={"a": [], "b": []})


def test_a_worker_never_gets_more_cores_than_its_machine_has(tiny_run):
    run = tiny_run.replace({"train.workers": 3, "train.batch_size": 6})
    assert cluster.share(run, 1, [Node(16)] * 4) == cluster.Shares(concurrent=1, cpus=16, gpus=0)
    two = run.replace({"cluster.max_concurrent": 2})  # 64 // 6 = 10 cores would place 4 workers, not 6
    assert cluster.share(two, 2, [Node(16)] * 4) == cluster.Shares(concurrent=2, cpus=8, gpus=0)


def test_a_worker_gets_a_gpu_where_there_are_some_and_the_target_may_use_them(tiny_run):
    run = tiny_run.replace({"cluster.max_concurrent": 8, "train.workers": 2})
    assert cluster.share(run, 8, [Node(64, 8), Node(64)]) == cluster.Shares(concurrent=4, cpus=8, gpus=1)
    half = run.replace({"cluster.gpus_per_worker": 0.5})
    assert cluster.share(half, 8, [Node(64, 2)]) == cluster.Shares(concurrent=2, cpus=16, gpus=0.5)
    on_cpu = run.replace({"target.device": "cpu"})
    assert cluster.share(on_cpu, 8, [Node(64, 8)]) == cluster.Shares(concurrent=8, cpus=4, gpus=0)


@pytest.mark.parametrize(
    "workers, node, complaint",
    [
        (4, Node(2), "4 workers with a core each don't fit, there are 2 cores"),
        (2, Node(8, 1), "a core and 1 GPUs each"),
    ],
)
def test_a_machine_that_is_too_small_is_refused(tiny_run, workers, node, complaint):
    with pytest.raises(UserError, match=complaint):
        cluster.share(tiny_run.replace({"train.workers": workers}), 1, [node])


def test_session_folders_of_killed_drivers_are_removed_and_those_in_use_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "TEMP", tmp_path)
    left, half = tmp_path / "draftlab-ray-left", tmp_path / "draftlab-ray-half-removed"
    left.mkdir()
    half.mkdir()
    (left / "lock").touch()
    with cluster._session() as first:
        assert not left.exists() and not half.exists()
        with cluster._session() as second:
            assert first.is_dir() and second.is_dir() and first != second
    assert not list(tmp_path.iterdir())


POINTS = {f"{a}{b}": (a, b) for a in range(3) for b in range(4)}


def searched(count, history=None, begun=(), score=lambda a, b: -abs(a - 2) - abs(b - 1)):
    """The names that Optuna suggests one after another, each told its score."""
    searcher = cluster._Optuna(POINTS, history or {}, begun, seed=0)
    names = []
    for i in range(count):
        suggested = searcher.suggest(f"t{i}")
        if suggested == Searcher.FINISHED:
            break
        names.append(suggested["trial"])
        searcher.on_trial_complete(f"t{i}", {METRIC: score(*POINTS[names[-1]])})
    return names


def test_optuna_tries_no_point_twice_and_ends_when_all_are_tried():
    names = searched(50)
    assert sorted(names) == sorted(POINTS)


def test_optuna_goes_on_from_what_an_interrupted_search_knew():
    history = {"00": [{SCORE: 1.0}, {SCORE: 1.5}], "21": [{}], "12": []}
    names = searched(5, history, begun=["03", "22"])
    assert names[:2] == ["03", "22"] and not set(names) & set(history)


def test_asha_compares_trials_at_equal_shares_of_their_training_and_remembers_those_that_ended():
    class Trial:
        def __init__(self, name):
            self.trial_id = name

    def told(asha, name, progress, score):
        trial = Trial(name)
        asha.on_trial_add(None, trial)
        return asha.on_trial_result(None, trial, {TIME: progress, METRIC: score})

    search = SearchConfig(scheduler="asha", grace=0.25, reduction=2)
    fresh = cluster._asha(search, {})
    assert told(fresh, "a", 0.25, 2.0) == "CONTINUE"
    assert told(fresh, "b", 0.2, 1.0) == "CONTINUE"  # too early to say
    assert told(fresh, "c", 0.3, 1.0) == "STOP" and told(fresh, "d", 0.3, 2.5) == "CONTINUE"
    past = {"a": [{"progress": 0.1, "loss": 3.0}, {"progress": 0.25, SCORE: 2.0}, {"progress": 1.0, SCORE: 3.0}]}
    assert told(cluster._asha(search, past), "b", 0.25, 1.0) == "STOP"
    assert told(cluster._asha(search, past), "b", 0.25, 2.1) == "CONTINUE"
    last = cluster._asha(search, past)
    assert told(last, "b", 1.0, 3.5) == "CONTINUE"
