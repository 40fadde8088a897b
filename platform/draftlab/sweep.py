"""A sweep from the varied values to the table, and its folder, from which it can be resumed at any time.

    sweep.yaml                  what is swept and where it is tracked
    results.csv, *.png          the report
    trials/<name>/trial.json    how far the trial is
    trials/<name>/reports.jsonl what it reported, a line a report
    trials/<name>/draft/        the draft of its best checkpoint
    trials/<name>/evaluation/   results.json and figures of that draft, decoding held-out prompts
    trials/<name>/traceback.txt why it failed
    ray/                        Ray's state and the checkpoints: the last and the best
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import re
import shutil
import signal
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from draftlab import checkpoint, cluster, corpus, evaluation, report, train
from draftlab import config as configs
from draftlab.config import Run
from draftlab.errors import UserError
from draftlab.prompts import load_prompts
from draftlab.target import load_target
from draftlab.tracking import Store

OUTPUTS = Path("outputs")

RUNNING, TRAINED, FINISHED, FAILED, KILLED = "RUNNING", "TRAINED", "FINISHED", "FAILED", "KILLED"
"""How far a trial is; TRAINED still has to be evaluated, and is RUNNING for MLflow."""


@dataclass(frozen=True)
class Plan:
    """What sweep.yaml holds: enough to go on with a sweep from its folder alone."""

    experiment: str
    """The question, e.g. sweep_block_size."""
    key: str
    """Unique; MLflow's runs are found again by it."""
    vary: dict[str, list[Any]]
    """Dotted key -> its values; every combination is a trial."""
    base: Run
    """What all trials share."""
    tracking_uri: str
    mlflow_run_id: str
    """The parent run."""
    prepared: dict[str, Any]
    """Fingerprints of the target and the corpus."""

    def save(self, folder: Path) -> None:
        """Write sweep.yaml."""
        text = yaml.safe_dump({**vars(self), "base": self.base.model_dump()}, sort_keys=False)
        _write(folder / "sweep.yaml", text)


def trials(base: Run, vary: Mapping[str, Sequence[Any]]) -> dict[str, Run]:
    """Every combination of the varied values as a named, validated run.

    Raises:
        UserError: an unknown key, a wrong value, or one that stands there twice.
    """
    runs: dict[str, Run] = {}
    for values in itertools.product(*vary.values()):
        changes = dict(zip(vary, values, strict=True))
        name = re.sub(r"[^\w-]", "_", "-".join(f"{key.rpartition('.')[2]}_{value}" for key, value in changes.items()))
        if name in runs:
            raise UserError(f"{', '.join(f'{key}={value}' for key, value in changes.items())} would be tried twice")
        runs[name or "draft"] = base.replace(changes)
    return runs


def start(
    experiment: str, base: Run, vary: Mapping[str, Sequence[Any]], out: Path | None, say: Callable[..., None]
) -> int:
    """Train and evaluate a draft for every combination of the varied values.

    Args:
        experiment: names the runs and the default folder.
        base: what the trials share.
        vary: dotted key -> its values; empty is a single trial.
        out: the sweep's folder; None is `outputs/<experiment>/<UTC time>`.
        say: shows a line.

    Returns:
        0, or 1 if a trial failed.

    Raises:
        UserError: before any long work, and before the folder exists.
        KeyboardInterrupt: at SIGINT or SIGTERM, when everything has been put away.
    """
    base = _anchor(base)
    runs = trials(base, vary)
    cluster.check(base, len(runs))
    folder = (out or OUTPUTS / experiment / f"{datetime.now(timezone.utc):%Y%m%dT%H%M%SZ}").resolve()
    report.check_folder(folder)
    store = _store(base, None, say)
    prepared = train.prepare(runs, say)
    _make(folder)
    with _stoppable(), _alone(folder):
        key = uuid.uuid4().hex[:12]
        flats = [run.flat() for run in runs.values()]
        shared = {name: value for name, value in flats[0].items() if all(flat[name] == value for flat in flats)}
        varied = {f"sweep.{name}": list(values) for name, values in vary.items()}
        tags = {"draftlab.experiment": experiment, "draftlab.folder": str(folder)}
        parent = store.start_run(f"{experiment} {folder.name}", key=key, params=shared | varied, tags=tags)
        plan = Plan(
            experiment=experiment,
            key=key,
            vary={name: list(values) for name, values in vary.items()},
            base=base,
            tracking_uri=store.uri,
            mlflow_run_id=parent,
            prepared=_fingerprints(prepared),
        )
        return _Sweep(plan, runs, folder, store, say).run(prepared)


def resume(folder: Path, say: Callable[..., None]) -> int:
    """Go on with an interrupted sweep: what has ended is kept, what failed is tried again.

    Args:
        folder: as `start` made it.
        say: shows a line.

    Returns, raises: as `start`.
    """
    folder = folder.resolve()
    plan = _load_plan(folder)
    runs = trials(plan.base, plan.vary)
    cluster.check(plan.base, len(runs))
    with _stoppable(), _alone(folder):
        store = _store(plan.base, plan.tracking_uri, say)
        prepared = train.prepare(runs, say)
        if _fingerprints(prepared) != plan.prepared:
            raise UserError(f"--resume {folder}: target or corpus have changed since; start a new sweep")
        if (found := store.start_run(f"{plan.experiment} {folder.name}", key=plan.key)) != plan.mlflow_run_id:
            store.end_run(found, FAILED, "made by a resumed sweep whose runs are not here")
            raise UserError(f"--resume {folder}: its MLflow run {plan.mlflow_run_id} is not in {store.uri}")
        return _Sweep(plan, runs, folder, store, say).run(prepared)


class _Sweep:
    """The driver's side of a sweep: it owns every record, on disk and in MLflow."""

    def __init__(self, plan: Plan, runs: dict[str, Run], folder: Path, store: Store, say: Callable[..., None]) -> None:
        self.plan, self.runs, self.folder, self.store, self.say = plan, runs, folder, store, say
        self.states = {name: self._read_state(name) for name in runs}
        self.heldout: dict[str, float] = {}
        self.evaluations: dict[str, evaluation.Evaluation] = {}
        plan.save(folder)

    def run(self, prepared: train.Prepared) -> int:
        """Train what isn't trained, evaluate what isn't evaluated, report."""
        self.prepared = prepared
        try:
            for name in self.runs:
                if self._status(name) == TRAINED:  # in an earlier process
                    self._start_run(name)
            todo = {name: run for name, run in self.runs.items() if self._status(name) not in (TRAINED, FINISHED)}
            if todo:
                self.say(f"{len(todo)} of {len(self.runs)} trials to train; starting Ray", doing="starting Ray")
                cluster.run_trials(todo, prepared, self.folder, self)
            self._evaluate()
            return self._report()
        except (KeyboardInterrupt, SystemExit):
            self.say(f"stopped; go on with --resume {self.folder}", doing="stopping")
            self._close(KILLED, "stopped by a signal")
            raise
        except BaseException as error:
            self.say(f"failed; go on with --resume {self.folder}", doing="stopping")
            self._close(FAILED, f"{type(error).__name__}: {error}")
            raise

    # What the cluster tells (cluster.Watch)

    def started(self, name: str) -> None:
        run_id = self._start_run(name)
        data = self.prepared.corpus
        self.store.log_dataset(run_id, "corpus", data["fingerprint"], data["source"], "training")
        self._write_state(name, status=RUNNING, run_id=run_id, reason=None)
        number = sum(bool(state) for state in self.states.values())  # they don't start in the order given
        self.say(f"{name}: trial {number} of {len(self.runs)} starts", doing=f"starting the workers of {name}")

    def _start_run(self, name: str) -> str:
        return self.store.start_run(
            name,
            key=f"{self.plan.key}/{name}",
            parent=self.plan.mlflow_run_id,
            params=self.runs[name].flat(),
            tags={"draftlab.experiment": self.plan.experiment, "draftlab.trial": name},
        )

    def reported(self, name: str, step: int, metrics: dict[str, float]) -> None:
        with (self._trial(name) / "reports.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")
        self.store.log_metrics(self._run_id(name), metrics, step)
        steps = self.runs[name].train.steps
        self.heldout[name] = metrics.get(cluster.SCORE, self.heldout.get(name))
        heldout = "" if self.heldout[name] is None else f"  held-out acceptance {self.heldout[name]:.2f}"
        left = round(metrics["train_seconds"] / step * (steps - step))
        self.say(
            f"{name}: step {step}/{steps}  loss {metrics['loss']:.3f}{heldout}"
            f"  {metrics['tokens_per_second']:,.0f} tokens/s  {left // 60}:{left % 60:02d} left",
            doing=f"training {name}",
        )

    def restarted(self, name: str, reason: str) -> None:
        self.say(f"{name}: {reason}; going on from its last checkpoint", doing=f"restarting the workers of {name}")

    def ended(self, name: str, failure: str | None) -> None:
        best = cluster.best_checkpoint(self.folder, name)
        if failure is None and best is None:
            failure = "it ended without a checkpoint"
        if failure is not None:
            self._write_state(name, status=FAILED, reason=failure)
            self.store.end_run(self._run_id(name), FAILED, failure)
            self.say(f"{name}: FAILED, {failure} (see {self._trial(name)})")
            return
        source, step, metrics = best
        draft = self._trial(name) / "draft"
        shutil.rmtree(draft, ignore_errors=True)
        shutil.copytree(source / "draft", draft)
        model_id = None
        if self.plan.base.tracking.log_checkpoints:
            model_id = self.store.log_checkpoint(
                self._run_id(name), draft, name=name, step=step, params=self.runs[name].flat(), metrics=metrics
            )
        last = self._reports(name)[-1]
        self._write_state(
            name,
            status=TRAINED,
            model_id=model_id,
            best_step=step,
            heldout_acceptance_length=metrics.get(cluster.SCORE),
            train_seconds=last["train_seconds"],
            supervised_tokens=last["supervised_tokens"],
        )
        self.say(f"{name}: trained; best at step {step}")

    # After the training

    def _evaluate(self) -> None:
        """Decode held-out prompts with every trained draft, in this process: Ray is down and the machine idle."""
        names = [name for name in self.runs if self._status(name) == TRAINED]
        if not names:
            return
        base = self.plan.base
        self.say(f"decoding held-out prompts with {len(names)} drafts", doing="loading the target")
        target = load_target(base.target)
        prompts = load_prompts("heldout", base, target, self.say)
        loaded = {
            name: checkpoint.load(self._trial(name) / "draft", dtype=target.dtype, device=target.device)
            for name in names
        }
        drafts = {name: draft for name, (draft, _) in loaded.items()}
        hashes = {name: info.hash for name, (_, info) in loaded.items()}
        self.evaluations = evaluation.evaluate(target, drafts, prompts, base.eval, self.say, base.seed, hashes)
        for name, result in self.evaluations.items():
            run_id, state = self._run_id(name), self.states[name]
            out = self._trial(name) / "evaluation"
            report.write_evaluation({name: result}, out)
            digest = result.provenance["prompts_hash"]
            self.store.log_dataset(run_id, "prompts", digest, base.corpus.source, "evaluation")
            self.store.log_metrics(
                run_id, result.metrics, state["best_step"], model_id=state["model_id"], dataset=("prompts", digest)
            )
            self.store.log_artifacts(run_id, out, "evaluation")
            self.store.log_table(run_id, result.prompts, "evaluation/prompts.csv")
            self._write_state(name, status=FINISHED)
            self.store.end_run(run_id, FINISHED)

    def _report(self) -> int:
        survivals = {name: found["survival"] for name in self.runs if (found := self._results(name))}
        curves = {name: self._reports(name) for name in self.runs}
        varied = next(iter(self.plan.vary), "draft.block_size")
        frame = report.write_sweep([self._row(name) for name in self.runs], curves, survivals, self.folder, varied)
        parent = self.plan.mlflow_run_id
        for path in (self.folder / "results.csv", *sorted(self.folder.glob("*.png")), self.folder / "sweep.yaml"):
            self.store.log_artifacts(parent, path)
        failed = [name for name in self.runs if self._status(name) == FAILED]
        self.say(f"{len(self.runs) - len(failed)} of {len(self.runs)} trials done\n{report.table(frame)}")
        if frame["speedup"].notna().any():
            self._name_winner(frame)
        self.say(f"results: {self.folder}")
        self.say(f"compare: {self.store.ui_command}")
        if failed:
            self.store.end_run(parent, FAILED, f"{len(failed)} of {len(self.runs)} trials failed: {', '.join(failed)}")
        else:
            self.store.end_run(parent, FINISHED)
        return 1 if failed else 0

    def _name_winner(self, frame: pd.DataFrame) -> None:
        """The fastest, and those that are not slower beyond the noise, by an interval paired over the prompts."""
        best = frame.loc[frame["speedup"].idxmax()]
        numbers = ("acceptance_length", "speedup", cluster.SCORE)
        metrics = {f"best.{number}": float(best[number]) for number in numbers if pd.notna(best[number])}
        self.store.log_metrics(self.plan.mlflow_run_id, metrics)
        self.say(
            f"fastest: {best['trial']}, {best['speedup']:.2f} times the target's own speed, "
            f"{best['acceptance_length']:.2f} tokens per round: {best['checkpoint']}"
        )
        winner = self.evaluations.get(best["trial"])
        for name, other in self.evaluations.items():
            if winner is not None and other is not winner:
                settings = self.plan.base.eval.bootstrap, self.plan.base.seed
                _, low, high = evaluation.compare(winner, other, "speedup", *settings)
                if low <= 0 <= high:
                    self.say(f"no difference beyond the noise: {name} (speedup {low:+.2f} to {high:+.2f})")

    def _row(self, name: str) -> dict[str, Any]:
        run, state = self.runs[name], self.states[name]
        flat = run.flat()
        row = {key.rpartition(".")[2]: flat[key] for key in self.plan.vary}
        row |= {"trial": name, "block_size": run.draft.block_size, "gamma": run.gamma}
        if found := self._results(name):
            row |= {key: value for key, value in found["metrics"].items() if key in (*report.COLUMNS, "divergences")}
            row["checkpoint"] = str(self._trial(name) / "draft")
        for key in ("train_seconds", "supervised_tokens", "heldout_acceptance_length", "status", "reason"):
            row[key] = state.get(key)
        return row | {"mlflow_run_id": state.get("run_id")}

    def _close(self, status: str, reason: str) -> None:
        """End every MLflow run of this sweep that is still running."""
        for name, state in self.states.items():
            if state.get("status") in (RUNNING, TRAINED):
                self.store.end_run(state["run_id"], status, reason)
                if state["status"] == RUNNING:
                    self._write_state(name, status=status, reason=reason)
        self.store.end_run(self.plan.mlflow_run_id, status, reason)

    # Records on disk

    def _trial(self, name: str) -> Path:
        return self.folder / "trials" / name

    def _status(self, name: str) -> str | None:
        return self.states[name].get("status")

    def _run_id(self, name: str) -> str:
        return self.states[name]["run_id"]

    def _read_state(self, name: str) -> dict[str, Any]:
        path = self._trial(name) / "trial.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def _write_state(self, name: str, **changes: Any) -> None:
        self.states[name] |= changes
        self._trial(name).mkdir(parents=True, exist_ok=True)
        _write(self._trial(name) / "trial.json", json.dumps(self.states[name], indent=1))

    def _reports(self, name: str) -> list[dict[str, float]]:
        """What a trial reported, in order; of a step that was done again, the last."""
        path = self._trial(name) / "reports.jsonl"
        if not path.exists():
            return []
        by_step: dict[int, dict[str, float]] = {}
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # the driver was killed while it wrote
                reported = json.loads(line)
                by_step[reported["step"]] = reported
        return [by_step[step] for step in sorted(by_step)]

    def _results(self, name: str) -> dict[str, Any] | None:
        if self._status(name) != FINISHED:
            return None
        return json.loads((self._trial(name) / "evaluation" / "results.json").read_text(encoding="utf-8"))[name]


def _store(base: Run, uri: str | None, say: Callable[..., None]) -> Store:
    say("opening the tracking store", doing="opening the tracking store")
    store = Store(base.tracking if uri is None else base.tracking.model_copy(update={"uri": uri}), OUTPUTS)
    if ended := store.reconcile():
        say(f"{ended} MLflow runs of processes that are gone: now KILLED")
    return store


def _anchor(run: Run) -> Run:
    """The run with absolute paths: workers and later resumes have other working directories."""
    changes = {}
    for key, value, names in (
        ("target.model", run.target.model, ("smollm2", "tiny")),
        ("corpus.source", run.corpus.source, ("packaged", "self")),
    ):
        if value not in names and (path := Path(value).expanduser()).exists():
            changes[key] = str(path.resolve())
    return run.replace(changes)


def _fingerprints(prepared: train.Prepared) -> dict[str, Any]:
    return {"target": prepared.target["fingerprint"], "corpus": prepared.corpus["fingerprint"]}


def _load_plan(folder: Path) -> Plan:
    path = folder / "sweep.yaml"
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
        return Plan(**{**data, "base": Run.model_validate(data["base"])})
    except OSError as error:
        raise UserError(f"--resume {folder}: no sweep there (sweep.yaml: {error.strerror})") from error
    except (yaml.YAMLError, TypeError, KeyError, ValueError) as error:
        raise UserError(f"--resume {folder}: sweep.yaml is damaged ({' '.join(str(error).split())})") from error


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {folder}: cannot be made ({error.strerror})") from error


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the sweep's folder; a lock that the system drops with the process, however that ends."""
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(f"{folder}: another process is working on this sweep") from error
        yield


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """SIGINT and SIGTERM raise KeyboardInterrupt, once; then nothing disturbs the putting away."""

    def stop(_number: int, _frame: Any) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {each: signal.signal(each, stop) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    path.with_suffix(".new").write_text(text, encoding="utf-8")
    os.replace(path.with_suffix(".new"), path)
