"""A sweep's folder: what is written there, so that the sweep can go on from it at any time.

    sweep.yaml                  what is swept and where it is tracked
    results.csv, *.png          the report, with report.md and verdicts.csv
    trials/<name>/trial.json    how far the trial is
    trials/<name>/reports.jsonl what it reported, a line a report
    trials/<name>/draft/        the draft of its best checkpoint
    trials/<name>/evaluation/   results.json, traces.jsonl and figures of that draft, decoding held-out prompts:
                                as <name> with its own block size, as `<name> b=B` with others
    trials/<name>/traceback.txt why it failed
    ray/                        Ray's state and the checkpoints: the last and the best

A record that is missing or damaged is as if it had never been written: what it stood for is done again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from draftlab.config import Run, Section
from draftlab.decode import Round, Trace
from draftlab.errors import UserError
from draftlab.evaluation import Case, Evaluation, Pair

RUNNING, TRAINED, FINISHED, STOPPED = "RUNNING", "TRAINED", "FINISHED", "STOPPED"
FAILED, KILLED = "FAILED", "KILLED"
"""How far a trial is. TRAINED still has to be evaluated, and is RUNNING for MLflow; STOPPED was given up early."""


class Plan(Section):
    """What sweep.yaml holds: enough to go on with a sweep from its folder alone."""

    experiment: str
    """The script, e.g. sweep_block_size."""
    question: str
    """What it asks."""
    key: str
    """Unique; MLflow's runs are found again by it."""
    vary: dict[str, list[Any] | dict[str, dict[str, Any]]]
    """As draftlab.search takes it."""
    baseline: str | None
    """The arm that the others are compared with; None, or one that has no result, is the best."""
    base: Run
    """What all trials share."""
    probe: dict[str, Any] | None = None
    """Settings of a trial that comes before the others and puts the target's layers in order."""
    proposed: list[int] | None = None
    """That order, from when it is known: resumed or not, the others keep it."""
    tracking_uri: str
    mlflow_run_id: str
    """The parent run."""
    prepared: dict[str, Any]
    """Fingerprints of the target and the corpus."""


def save_plan(folder: Path, plan: Plan) -> None:
    """Write sweep.yaml."""
    write(folder / "sweep.yaml", yaml.safe_dump(plan.model_dump(), sort_keys=False))


def load_plan(folder: Path) -> Plan:
    """Read sweep.yaml.

    Raises:
        UserError: there is none, or it is damaged.
    """
    try:
        return Plan.model_validate(yaml.safe_load((folder / "sweep.yaml").read_text(encoding="utf-8")))
    except OSError as error:
        raise UserError(f"--resume {folder}: no sweep there (sweep.yaml: {error.strerror})") from error
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"--resume {folder}: sweep.yaml is damaged ({' '.join(str(error).split())})") from error


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold a sweep's folder; a lock that the system drops with the process, however that ends.

    Raises:
        UserError: another process holds it, or it can't be written.
    """
    try:
        file = (folder / ".lock").open("w")
    except OSError as error:
        raise UserError(f"{folder}: can't be locked (.lock: {error.strerror})") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(f"{folder}: another process is working on this sweep") from error
        yield


class Record:
    """What is known of one trial.

    Args:
        folder: the trial's, made when something is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.name = folder, folder.name
        self.state: dict[str, Any] = self._read_state()

    @property
    def status(self) -> str | None:
        """None before it starts."""
        return self.state.get("status")

    @property
    def run_id(self) -> str:
        """Its MLflow run."""
        return self.state["run_id"]

    @property
    def draft(self) -> Path:
        """The folder of its best draft."""
        return self.folder / "draft"

    def change(self, **changes: Any) -> None:
        """Change its state, here and on disk."""
        self.state |= changes
        self.folder.mkdir(parents=True, exist_ok=True)
        write(self.folder / "trial.json", json.dumps(self.state, indent=1))

    def add_report(self, step: int, metrics: dict[str, float]) -> None:
        """Append what it reported."""
        with (self.folder / "reports.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")

    def reports(self) -> list[dict[str, float]]:
        """What it reported, in order; where it went on from an earlier step, what followed that step was lost."""
        path = self.folder / "reports.jsonl"
        if not path.is_file():
            return []
        reports: list[dict[str, float]] = []
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError):  # the driver was killed while it wrote
                step = (reported := json.loads(line))["step"]
                while reports and reports[-1]["step"] >= step:
                    reports.pop()
                reports.append(reported)
        return reports

    def results(self) -> Evaluation | None:
        """What decoding said, once that is done, without traces: evaluation/results.json."""
        return self.by_block_size()[self.name] if self.status == FINISHED else None

    def by_block_size(self) -> dict[str, Evaluation]:
        """The same, and what decoding at other block sizes said."""
        found = json.loads((self.folder / "evaluation" / "results.json").read_text(encoding="utf-8"))
        return {name: Evaluation(**each, traces=[]) for name, each in found.items()}

    def pairs(self) -> list[Pair]:
        """The traces of its decoding at its own block size: evaluation/traces.jsonl."""
        pairs = []
        for line in (self.folder / "evaluation" / "traces.jsonl").read_text(encoding="utf-8").splitlines():
            found = json.loads(line)
            if found["draft"] == self.name:
                pair = found["traces"]
                pairs.append(Pair(Case(**pair["case"]), *(_trace(pair[side]) for side in ("target", "draft"))))
        return pairs

    def _is_decoded(self) -> bool:
        try:
            self.pairs()
            return self.name in self.by_block_size()
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return False

    def _read_state(self) -> dict[str, Any]:
        try:
            state = json.loads((self.folder / "trial.json").read_text(encoding="utf-8"))
            if not isinstance(state["run_id"], str) or state["status"] == TRAINED and "best_step" not in state:
                return {}
        except (OSError, ValueError, TypeError, KeyError):
            return {}
        if state["status"] == FINISHED and not self._is_decoded():
            state["status"] = TRAINED
        if state["status"] == TRAINED and not (self.draft / "model.safetensors").is_file():
            return {}
        return state


def _trace(data: dict[str, Any]) -> Trace:
    return Trace(**{**data, "rounds": [Round(**each) for each in data["rounds"]]})


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    path.with_suffix(".new").write_text(text, encoding="utf-8")
    os.replace(path.with_suffix(".new"), path)
