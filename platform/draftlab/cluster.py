"""Trials on Ray: each is a Ray Train run that Ray Tune launches. The only importer of ray.

The driver starts Ray, hands Tune the trials' names and hears of every report; it owns all records. A trial holds no
core itself: it launches Ray Train's controller, which starts the workers. Names are deterministic, so launching a
trial again continues it from its last checkpoint.

Tune chooses trials by name: from a list, or by Optuna over the trials there are, as whole numbers for the place of each
varied value. ASHA stops trials from outside; what they held is given back here (`_Listener.on_step_end`).
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import itertools
import logging
import math
import os
import random
import resource
import shutil
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import optuna
import ray
import ray.train
import torch
from ray import tune
from ray.train.torch import TorchConfig, TorchTrainer
from ray.tune.integration.ray_train import TuneReportCallback
from ray.tune.progress_reporter import TrialProgressCallback
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search import Searcher
from ray.tune.search.optuna import OptunaSearch
from ray.util.placement_group import PlacementGroup, get_current_placement_group, remove_placement_group

from draftlab import train
from draftlab.config import ClusterConfig, Run, SearchConfig
from draftlab.errors import UserError
from draftlab.train import Prepared, Report

SCORE = "heldout_acceptance_length"
"""What the best checkpoint is best at, and what searches and ASHA go by; the larger the better."""

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AIR_NEW_OUTPUT": "0",  # prints tables whatever the verbosity
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # a report waits for the controller's next look, 2 s by default
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "180",  # a busy machine is slow to import torch
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # a process of 107 MB per trial
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": "0",
    "RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING": "0",
    "RAY_gcs_server_port_wait_time_s": "180",  # and slow to start Ray's own processes, 30 s by default
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # not every report has a held-out acceptance
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # with Tune's handler, fit() returns as if nothing had happened
}
"""Read by Ray in the driver and in its processes; what the user has set already is kept."""

TEMP = Path("/tmp")
"""Home of Ray's session folders: their sockets' paths may have 107 characters."""

RAY_STARTS = 4
"""Attempts to start Ray: it gives its raylet 30 s and has no setting for that."""

REAP_SECONDS = 3.0
"""How long a trial that was stopped may take to put its workers away itself."""


class Watch(Protocol):
    """What the driver does when it hears from a trial; called in the driver's main thread."""

    def started(self, name: str) -> None: ...

    def reported(self, name: str, step: int, metrics: dict[str, float]) -> None: ...

    def restarted(self, name: str, reason: str) -> None: ...

    def ended(self, name: str, failure: str | None, stopped: str | None) -> None: ...


@dataclass(frozen=True)
class Node:
    """A machine."""

    cpus: int
    gpus: float = 0.0


@dataclass(frozen=True)
class Shares:
    """How the machines are divided among the trials of a sweep."""

    concurrent: int
    """Trials at once."""
    cpus: int
    """Cores of one worker."""
    gpus: float
    """GPUs of one worker."""


def share(run: Run, trials: int, nodes: Sequence[Node]) -> Shares:
    """Divide cores and GPUs among the workers that run at once, so that all of them find their place.

    Args:
        run: its workers, `cluster.max_concurrent` and `cluster.gpus_per_worker`.
        trials: how many there are to run.
        nodes: the machines there are.

    Raises:
        UserError: not even one trial fits.
    """
    workers, gpus = run.train.workers, run.cluster.gpus_per_worker
    if gpus == "auto":
        gpus = float(any(node.gpus for node in nodes) and not run.target.device.startswith("cpu"))

    def places(cpus: int) -> int:
        """Workers that fit if each gets this many cores."""
        return sum(min(node.cpus // cpus, int(node.gpus / gpus) if gpus else node.cpus) for node in nodes)

    concurrent = min(places(1) // workers, run.cluster.max_concurrent, trials)
    if concurrent < 1:
        raise UserError(
            f"train.workers: {workers} workers with a core{f' and {gpus:g} GPUs' if gpus else ''} each don't fit, "
            f"there are {sum(node.cpus for node in nodes)} cores and {sum(node.gpus for node in nodes):g} GPUs"
        )
    most = max(node.cpus for node in nodes)
    cpus = next(cpus for cpus in range(most, 0, -1) if places(cpus) >= concurrent * workers)
    return Shares(concurrent, cpus, gpus)


def find_shares(runs: Collection[Run]) -> Shares:
    """`share` of the machines there are: this one, without starting Ray, or those of the cluster, which is asked.

    Raises:
        UserError: as `share`, or there is no cluster at `cluster.address`.
    """
    run = _widest(runs)
    if run.cluster.address == "local":
        return share(run, len(runs), [Node(run.cluster.cpus or cores(), torch.cuda.device_count())])
    with _ray(run.cluster) as nodes:
        return share(run, len(runs), nodes)


def _widest(runs: Collection[Run]) -> Run:
    """The one with the most workers, by whose needs the machines are divided."""
    return max(runs, key=lambda run: run.train.workers)


def cores() -> int:
    """Cores this process may use: its affinity, and the quota of its container."""
    count = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):  # no such file outside cgroup v2; "max" where there is no quota
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        count = min(count, max(1, math.ceil(int(quota) / int(period))))
    return count


def memory() -> int:
    """Bytes of memory that there are here: the machine's, or the limit of its container."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # as in `cores`
        there = min(there, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return there


def run_trials(
    runs: Mapping[str, Run],
    prepared: Prepared,
    folder: Path,
    watch: Watch,
    points: Mapping[str, tuple[int, ...]] | None = None,
    history: Mapping[str, Sequence[Mapping[str, float]]] | None = None,
    begun: Sequence[str] = (),
    time_budget: float | None = None,
) -> None:
    """Train every run, or those that a search chooses, each as a Ray Train job; return when the last one has ended.

    A trial that fails leaves `trials/<name>/traceback.txt` and doesn't stop the others; one that ran before goes on
    from its last checkpoint.

    Args:
        runs: trial name -> its run; they share `cluster` and `search`.
        prepared: from `draftlab.train.prepare` over all of them.
        folder: the sweep's; Ray keeps its state and the checkpoints in `ray/`.
        watch: hears of every start, report, restart and end.
        points: trial name -> the place of each varied value; what Optuna searches. None: all runs are trained.
        history: trial name -> what a trial that has ended before reported; searches and ASHA go on from there.
        begun: trials that Optuna chose before and that have not ended.
        time_budget: seconds after which those that still run are stopped.

    Raises:
        UserError: the machine is too small for one trial, or there is no cluster at `cluster.address`.
    """
    folder = folder.resolve()  # workers run elsewhere
    history = history or {}
    widest = _widest(runs.values())
    search = widest.search
    listener = _Listener(watch, folder)
    with _ray(widest.cluster) as nodes:
        shares = share(widest, len(runs) + len(history), nodes)  # a resumed trial has no more than it had
        tune_state = folder / "ray" / "tune"
        shutil.rmtree(tune_state, ignore_errors=True)  # of an interrupted sweep; Train's state is what continues
        launch = functools.partial(_launch, runs=dict(runs), prepared=prepared, folder=folder, shares=shares)
        # Where a trial itself runs; not a core, or two trials with a core each could leave none for their workers.
        place = tune.PlacementGroupFactory([{"node:__internal_head__": 0.001}])
        if points is not None:
            optuna.logging.set_verbosity(optuna.logging.ERROR)
            searcher = _Optuna({name: points[name] for name in (*runs, *history)}, history, begun, widest.seed)
            which = {"search_alg": searcher, "num_samples": search.samples - len(history)}
            space = {}
        else:
            # the longest first, so that the last one doesn't run long after the others
            which, space = {}, {"trial": tune.grid_search(sorted(runs, key=lambda name: -_slots(runs[name])))}
        tune.Tuner(
            tune.with_resources(launch, place),
            param_space=space,
            tune_config=tune.TuneConfig(
                max_concurrent_trials=shares.concurrent,
                scheduler=_asha(search, history) if search.scheduler == "asha" else None,
                time_budget_s=time_budget,
                trial_name_creator=_trial_name,
                trial_dirname_creator=_trial_name,
                reuse_actors=search.scheduler == "none",  # a trial that was stopped doesn't give its process back
                **which,
            ),
            run_config=tune.RunConfig(
                name=tune_state.name,
                storage_path=str(tune_state.parent),
                callbacks=[listener],
                verbose=0,
            ),
        ).fit()
    for name in listener.running:  # Tune tells nothing of those that the time budget cuts off
        watch.ended(name, None, "the time budget is used up")


def _slots(run: Run) -> int:
    """Slots times layers that a run trains through, in all: what its time grows with."""
    per_step = run.train.batch_size * run.train.anchors * run.draft.block_size
    return run.train.steps * per_step * run.draft.num_hidden_layers


def best_checkpoint(folder: Path, name: str) -> tuple[Path, int, dict[str, float]] | None:
    """A trial's best checkpoint: its folder, its step, and the metrics reported with it; None if there is none."""
    try:
        kept = ray.train.Result.from_path(str(folder.resolve() / "ray" / name)).best_checkpoints
    except RuntimeError:  # Ray Train has written nothing there
        return None
    if not kept:
        return None
    checkpoint, report = max(kept, key=lambda item: item[1]["metrics"].get(SCORE, -math.inf))
    return Path(checkpoint.path), report["step"], report["metrics"]


@contextlib.contextmanager
def _ray(config: ClusterConfig) -> Iterator[list[Node]]:
    """Ray, up and running; yields its machines."""
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # prints the tracebacks that the trials' files have
    quiet: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": "ERROR",
        "logging_config": ray.LoggingConfig(log_level="ERROR"),
    }
    with contextlib.ExitStack() as stack:
        session = stack.enter_context(_session()) if config.address == "local" else None
        stack.callback(_reinstall_signal_handlers)
        stack.callback(ray.shutdown)
        on_sigterm = signal.getsignal(signal.SIGTERM)
        try:
            if session:
                _start(
                    num_cpus=config.cpus or cores(),
                    object_store_memory=200_000_000,
                    include_dashboard=False,
                    _temp_dir=str(session),
                    **quiet,
                )
            else:
                _knock(config.address)
                ray.init(address=config.address, runtime_env={"env_vars": ENVIRONMENT}, **quiet)
        except (OSError, RuntimeError, ValueError) as error:
            raise UserError(f"cluster.address: no Ray at {config.address!r} ({error})") from error
        finally:
            signal.signal(signal.SIGTERM, on_sigterm)  # ray.init sets its own, which exits at once
        found = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        yield [Node(int(each.get("CPU", 0)), each.get("GPU", 0.0)) for each in found]


def _knock(address: str) -> None:
    """Raise OSError where nobody listens at host:port; Ray itself tries for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


def _start(**how: Any) -> None:
    """Start Ray on this machine, however busy that is."""
    for attempts_left in reversed(range(RAY_STARTS)):
        try:
            ray.init(address="local", **how)
            return
        except Exception as error:  # Ray raises nothing more special
            ray.shutdown()
            if "timed out during startup" not in str(error) or not attempts_left:
                raise


def _reinstall_signal_handlers() -> None:
    """ray.shutdown leaves SIGTERM at the system's default, behind Python's back."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.getsignal(number))


@contextlib.contextmanager
def _session() -> Iterator[Path]:
    """A folder for Ray's session, 50 MB and more, removed afterwards; so are those of drivers that were killed."""
    for left in TEMP.glob("draftlab-ray-*"):
        with contextlib.suppress(OSError), (left / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held for as long as its driver lives
            shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix="draftlab-ray-", dir=TEMP))
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield folder
        finally:
            for _ in range(20):  # Ray's processes write to it until they have ended, which takes a moment
                shutil.rmtree(folder, ignore_errors=True)
                if not folder.exists():
                    break
                time.sleep(0.25)


def _trial_name(trial: Any) -> str:
    return trial.config["trial"]


def _launch(config: dict[str, Any], *, runs: dict[str, Run], prepared: Prepared, folder: Path, shares: Shares) -> None:
    """One Tune trial: a Ray Train run, launched again when a worker died, but not when the training itself raised."""
    name = config["trial"]
    run = runs[name]
    trial = folder / "trials" / name
    trial.mkdir(parents=True, exist_ok=True)
    failure = trial / "traceback.txt"
    failure.unlink(missing_ok=True)
    for restarts_left in reversed(range(run.cluster.max_failures + 1)):
        trainer = TorchTrainer(
            _work,
            train_loop_config={
                "run": run,
                "prepared": prepared,
                "failure": failure,
                "threads": run.train.threads or shares.cpus,
            },
            # NCCL wants a GPU of its own for each worker
            torch_config=TorchConfig(backend="nccl" if shares.gpus >= 1 else "gloo"),
            scaling_config=ray.train.ScalingConfig(
                num_workers=run.train.workers,
                use_gpu=shares.gpus > 0,
                resources_per_worker={"CPU": shares.cpus} | ({"GPU": shares.gpus} if shares.gpus else {}),
            ),
            run_config=ray.train.RunConfig(
                name=name,
                storage_path=str(folder / "ray"),
                callbacks=[TuneReportCallback()],
                failure_config=ray.train.FailureConfig(max_failures=0, controller_failure_limit=2),
                # the best one; the last one is always kept too
                checkpoint_config=ray.train.CheckpointConfig(
                    num_to_keep=1, checkpoint_score_attribute=f"metrics/{SCORE}", checkpoint_score_order="max"
                ),
            ),
        )
        try:
            trainer.fit()
            return
        except ray.train.TrainingFailedError as error:
            dead = _dead(error)
            if failure.exists() and not dead:
                raise RuntimeError(_last_line(failure.read_text())) from None
            failure.unlink(missing_ok=True)  # of those who lost the dead one
            reason = f"worker {dead} died: killed, out of memory, or crashed" if dead else _last_line(str(error))
            if not restarts_left:
                failure.write_text(f"{error}\n{reason}\n")
                raise RuntimeError(reason) from None
            tune.report({"restart": reason})


def _work(config: dict[str, Any]) -> None:
    """One Ray Train worker."""
    run, failure = config["run"], config["failure"]
    torch.set_num_threads(config["threads"])
    if run.cluster.worker_memory_gb:
        most = int(run.cluster.worker_memory_gb * 1e9)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    context = ray.train.get_context()
    checkpoint = ray.train.get_checkpoint()
    try:
        with checkpoint.as_directory() if checkpoint else contextlib.nullcontext() as resume:
            train.train(
                run,
                config["prepared"],
                rank=context.get_world_rank(),
                world_size=context.get_world_size(),
                report=_report,
                resume=Path(resume) if resume else None,
                workdir=Path.cwd(),  # in Ray's session folder
            )
    except Exception as error:
        with contextlib.suppress(FileExistsError), failure.open("x") as file:  # the first worker to fail tells why
            file.write(traceback.format_exc())
        raise RuntimeError(_last_line(traceback.format_exc())) from error


def _report(report: Report) -> None:
    ray.train.report(
        {
            "step": report.step,
            "metrics": report.metrics,
            "placement_group": get_current_placement_group().id.hex(),
        },
        checkpoint=report.checkpoint and ray.train.Checkpoint.from_directory(str(report.checkpoint)),
        # deterministic: a step done again overwrites what a crash left unregistered
        checkpoint_dir_name=f"step_{report.step:07d}",
    )
    if report.checkpoint:
        shutil.rmtree(report.checkpoint)


class _Listener(TrialProgressCallback):
    """Tells the driver's watch what Tune hears from a trial; in place of Tune's own callback, which prints.

    A trial that is stopped from outside leaves its workers' placement group behind (ray-project/ray#54305), and with it
    their cores; the listener removes it.
    """

    def __init__(self, watch: Watch, folder: Path) -> None:
        super().__init__()
        self.watch, self.folder = watch, folder
        self.running: list[str] = []
        self.left: list[tuple[float, str]] = []  # (when to remove it, placement group)

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune pickles its callbacks for a restore of its own, which is not used here

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
        self.running.append(_trial_name(trial))
        self.watch.started(_trial_name(trial))

    def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **_: Any) -> None:
        if "restart" in result:
            self.watch.restarted(_trial_name(trial), result["restart"])
        elif "metrics" in result:
            self.watch.reported(_trial_name(trial), result["step"], result["metrics"])

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
        self.running.remove(_trial_name(trial))
        last = trial.last_result or {}
        early = last.get("metrics", {}).get("progress", 1) < 1
        self._leave(last)  # ASHA may stop a trial at its very end, too
        self.watch.ended(_trial_name(trial), None, BEHIND if early else None)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
        self.running.remove(_trial_name(trial))
        failure = self.folder / "trials" / _trial_name(trial) / "traceback.txt"
        if not failure.exists():  # the trial's own process died
            failure.parent.mkdir(parents=True, exist_ok=True)
            failure.write_text(Path(trial.error_file).read_text() if trial.error_file else "the trial's process died\n")
        self._leave(trial.last_result or {})
        self.watch.ended(_trial_name(trial), _last_line(failure.read_text()), None)

    def on_step_end(self, iteration: int, trials: list[Any], **_: Any) -> None:
        now = time.monotonic()
        for when, group in self.left:
            if when <= now:
                remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(group))))
        self.left = [(when, group) for when, group in self.left if when > now]

    def _leave(self, last: Mapping[str, Any]) -> None:
        if "placement_group" in last:
            self.left.append((time.monotonic() + REAP_SECONDS, last["placement_group"]))


BEHIND = "its held-out acceptance fell behind"
"""Why ASHA stops a trial."""

PATIENCE = 20
"""How often Optuna may suggest what was tried already, until a point that wasn't is drawn for it."""

METRIC, TIME = f"metrics/{SCORE}", "metrics/progress"
"""Where Tune finds them in a report."""


class _Optuna(OptunaSearch):
    """Tune's Optuna searcher over the trials there are, none of which is tried twice.

    A varied value is known to it by its place, so values should be given in an order that means something.
    """

    def __init__(
        self,
        points: Mapping[str, tuple[int, ...]],
        history: Mapping[str, Sequence[Mapping[str, float]]],
        begun: Sequence[str],
        seed: int,
    ) -> None:
        most = [max(places) for places in zip(*points.values(), strict=True)]
        super().__init__(
            {str(i): optuna.distributions.IntDistribution(0, high) for i, high in enumerate(most)},
            metric=METRIC,
            mode="max",
            seed=seed,
            points_to_evaluate=[self._point(points[name]) for name in begun],
        )
        self.names = {place: name for name, place in points.items()}
        self.tried = set(history)
        self.random = random.Random(seed)
        self.asked: dict[str, str] = {}  # Tune's id of a trial -> Optuna's
        for name, reports in history.items():
            if scores := [report[SCORE] for report in reports if SCORE in report]:
                self.add_evaluated_point(self._point(points[name]), scores[-1])

    @staticmethod
    def _point(places: tuple[int, ...]) -> dict[str, int]:
        return {str(i): place for i, place in enumerate(places)}

    def suggest(self, trial_id: str) -> dict[str, Any] | str:
        untried = [place for place, name in self.names.items() if name not in self.tried]
        for attempt in itertools.count() if untried else ():
            if attempt == PATIENCE:
                self._ot_study.enqueue_trial(self._point(self.random.choice(untried)))
            self.asked[trial_id] = f"{trial_id} {attempt}"
            point = super().suggest(self.asked[trial_id])
            name = self.names.get(tuple(point[str(i)] for i in range(len(point))))
            if name is not None and name not in self.tried:
                self.tried.add(name)
                return {"trial": name}
            super().on_trial_complete(self.asked[trial_id], error=True)
        return Searcher.FINISHED

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        pass  # Optuna's own early stopping is not used

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        super().on_trial_complete(self.asked[trial_id], result, error)


def _asha(search: SearchConfig, history: Mapping[str, Sequence[Mapping[str, float]]]) -> ASHAScheduler:
    """ASHA by shares of the training, so that trials of different length meet; its rungs stand where they stood."""
    asha = ASHAScheduler(
        TIME, METRIC, "max", max_t=0.99, grace_period=search.grace, reduction_factor=search.reduction,
        stop_last_trials=False,
    )  # fmt: skip
    for name, reports in history.items():
        past = SimpleNamespace(trial_id=name)
        asha.on_trial_add(None, past)
        for report in reports:
            asha.on_trial_result(None, past, {f"metrics/{key}": value for key, value in report.items()})
    return asha


def _dead(error: ray.train.TrainingFailedError) -> str:
    """The ranks of the workers whose process is gone, by comma."""
    failures = error.worker_failures if isinstance(error, ray.train.WorkerGroupError) else {}
    # Ray's wrapper of what its look at a worker met; one that raised has answered instead.
    return ", ".join(str(rank) for rank in sorted(failures) if hasattr(failures[rank], "health_check_failure"))


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2].strip() or "unknown failure"
