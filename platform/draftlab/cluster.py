"""Trials on Ray: each is a Ray Train run that Ray Tune launches. The only importer of ray.

The driver starts Ray, hands Tune the trials' names and hears of every report; it owns all records. A trial holds no
core itself: it launches Ray Train's controller, which starts the workers. Names are deterministic, so launching a
trial again continues it from its last checkpoint.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import math
import os
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ray
import ray.train
import torch
from ray import tune
from ray.train.torch import TorchConfig, TorchTrainer
from ray.tune.integration.ray_train import TuneReportCallback
from ray.tune.progress_reporter import TrialProgressCallback

from draftlab import train
from draftlab.config import ClusterConfig, Run
from draftlab.errors import UserError
from draftlab.train import Prepared, Report

SCORE = "heldout_acceptance_length"
"""What the best checkpoint is best at; the larger the better."""

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
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # with Tune's handler, fit() returns as if nothing had happened
}
"""Read by Ray in the driver and in its processes; what the user has set already is kept."""

TEMP = Path("/tmp")
"""Home of Ray's session folders: their sockets' paths may have 107 characters."""


class Watch(Protocol):
    """What the driver does when it hears from a trial; called in the driver's main thread."""

    def started(self, name: str) -> None: ...

    def reported(self, name: str, step: int, metrics: dict[str, float]) -> None: ...

    def restarted(self, name: str, reason: str) -> None: ...

    def ended(self, name: str, failure: str | None) -> None: ...


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


def check(run: Run, trials: int) -> None:
    """Refuse, before any long work, what this machine can't hold; a cluster is asked when Ray has joined it.

    Raises:
        UserError: as `share`.
    """
    if run.cluster.address == "local":
        share(run, trials, [Node(run.cluster.cpus or cores(), torch.cuda.device_count())])


def cores() -> int:
    """Cores this process may use: its affinity, and the quota of its container."""
    count = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):  # no such file outside cgroup v2; "max" where there is no quota
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        count = min(count, max(1, math.ceil(int(quota) / int(period))))
    return count


def run_trials(runs: Mapping[str, Run], prepared: Prepared, folder: Path, watch: Watch) -> None:
    """Train every run to its end, each as a Ray Train job, and return when the last one has ended.

    A trial that fails leaves `trials/<name>/traceback.txt` and doesn't stop the others; one that ran before goes on
    from its last checkpoint.

    Args:
        runs: trial name -> its run; they share `cluster`.
        prepared: from `draftlab.train.prepare` over all of them.
        folder: the sweep's; Ray keeps its state and the checkpoints in `ray/`.
        watch: hears of every start, report, restart and end.

    Raises:
        UserError: the machine is too small for one trial, or there is no cluster at `cluster.address`.
    """
    folder = folder.resolve()  # workers run elsewhere
    widest = max(runs.values(), key=lambda run: run.train.workers)
    with _ray(widest.cluster) as nodes:
        shares = share(widest, len(runs), nodes)
        tune_state = folder / "ray" / "tune"
        shutil.rmtree(tune_state, ignore_errors=True)  # of an interrupted sweep; Train's state is what continues
        launch = functools.partial(_launch, runs=dict(runs), prepared=prepared, folder=folder, shares=shares)
        # Where a trial itself runs; not a core, or two trials with a core each could leave none for their workers.
        place = tune.PlacementGroupFactory([{"node:__internal_head__": 0.001}])
        tune.Tuner(
            tune.with_resources(launch, place),
            # the longest first, so that the last one doesn't run long after the others
            param_space={"trial": tune.grid_search(sorted(runs, key=lambda name: -_slots(runs[name])))},
            tune_config=tune.TuneConfig(
                max_concurrent_trials=shares.concurrent,
                trial_name_creator=_trial_name,
                trial_dirname_creator=_trial_name,
                reuse_actors=True,
            ),
            run_config=tune.RunConfig(
                name=tune_state.name, storage_path=str(tune_state.parent), callbacks=[_Listener(watch, folder)], verbose=0
            ),
        ).fit()


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
                ray.init(
                    address="local",
                    num_cpus=config.cpus or cores(),
                    object_store_memory=200_000_000,
                    include_dashboard=False,
                    _temp_dir=str(session),
                    **quiet,
                )
            else:
                ray.init(address=config.address, runtime_env={"env_vars": ENVIRONMENT}, **quiet)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise UserError(f"cluster.address: no Ray at {config.address!r} ({error})") from error
        finally:
            signal.signal(signal.SIGTERM, on_sigterm)  # ray.init sets its own, which exits at once
        found = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        yield [Node(int(each.get("CPU", 0)), each.get("GPU", 0.0)) for each in found]


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
            train_loop_config={"run": run, "prepared": prepared, "failure": failure, "threads": run.train.threads or shares.cpus},
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
            if failure.exists():
                raise RuntimeError(_last_line(failure.read_text())) from None
            reason = _death(error)
            if not restarts_left:
                failure.write_text(f"{error}\n{reason}\n")
                raise RuntimeError(reason) from None
            tune.report({"restart": reason})


def _work(config: dict[str, Any]) -> None:
    """One Ray Train worker."""
    run, failure = config["run"], config["failure"]
    torch.set_num_threads(config["threads"])
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
        {"step": report.step, "metrics": report.metrics},
        checkpoint=report.checkpoint and ray.train.Checkpoint.from_directory(str(report.checkpoint)),
        # deterministic: a step done again overwrites what a crash left unregistered
        checkpoint_dir_name=f"step_{report.step:07d}",
    )
    if report.checkpoint:
        shutil.rmtree(report.checkpoint)


class _Listener(TrialProgressCallback):
    """Tells the driver's watch what Tune hears from a trial; in place of Tune's own callback, which prints."""

    def __init__(self, watch: Watch, folder: Path) -> None:
        super().__init__()
        self.watch, self.folder = watch, folder

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune pickles its callbacks for a restore of its own, which is not used here

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
        self.watch.started(_trial_name(trial))

    def on_trial_result(self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **_: Any) -> None:
        if "restart" in result:
            self.watch.restarted(_trial_name(trial), result["restart"])
        elif "metrics" in result:
            self.watch.reported(_trial_name(trial), result["step"], result["metrics"])

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
        self.watch.ended(_trial_name(trial), None)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
        failure = self.folder / "trials" / _trial_name(trial) / "traceback.txt"
        if not failure.exists():  # the trial's own process died
            failure.parent.mkdir(parents=True, exist_ok=True)
            failure.write_text(Path(trial.error_file).read_text() if trial.error_file else "the trial's process died\n")
        self.watch.ended(_trial_name(trial), _last_line(failure.read_text()))


def _death(error: ray.train.TrainingFailedError) -> str:
    """Why a run ended although no worker raised."""
    if not isinstance(error, ray.train.WorkerGroupError):
        return _last_line(str(error))
    ranks = ", ".join(str(rank) for rank in sorted(error.worker_failures))
    return f"worker {ranks} died: killed, out of memory, or crashed"


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2].strip() or "unknown failure"
