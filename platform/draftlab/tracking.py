"""Runs, metrics and checkpoints in MLflow; the only importer of mlflow.

Everything goes through one `Store` and MLflow's client: no active run, no global state, so that several drivers
can write to one store. Runs are found again by a key, so that a resumed sweep continues them.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import os
import platform
import re
import shlex
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

# Read by mlflow when it is imported or later; what the user has set stays.
for _name, _value in {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "GIT_PYTHON_REFRESH": "quiet",
}.items():
    os.environ.setdefault(_name, _value)

import mlflow.artifacts  # noqa: E402
import pandas as pd  # noqa: E402
import psutil  # noqa: E402
import sqlalchemy  # noqa: E402
from mlflow import MlflowClient  # noqa: E402
from mlflow.entities import (  # noqa: E402
    Dataset,
    DatasetInput,
    InputTag,
    LoggedModel,
    LoggedModelInput,
    LoggedModelOutput,
    Metric,
    Param,
    RunTag,
)
from mlflow.entities import Run as MlflowRun  # noqa: E402
from mlflow.exceptions import MlflowException  # noqa: E402
from mlflow.tracking.context import registry  # noqa: E402

from draftlab import __version__  # noqa: E402
from draftlab.config import TrackingConfig  # noqa: E402
from draftlab.errors import UserError  # noqa: E402

if TYPE_CHECKING:
    from draftlab.evaluation import Evaluation

PARAM_LIMIT, TAG_LIMIT = 6000, 8000
"""Characters that MLflow keeps of a value; it cuts the rest silently."""

METRICS_AT_ONCE, PARAMS_AT_ONCE = 1000, 100
"""What one request may carry."""


class Store:
    """A tracking store, opened and ready.

    Args:
        config: where and under which experiment.
        root: the outputs folder; the default store is made in root/mlflow.

    Raises:
        UserError: the server doesn't answer within about 10 seconds, or the store can't be opened.
    """

    uri: str
    """Absolute tracking URI."""
    experiment_id: str

    def __init__(self, config: TrackingConfig, root: Path) -> None:
        default = f"sqlite:///{Path(root).absolute() / 'mlflow' / 'mlflow.db'}"
        uri = _absolute(config.uri or os.environ.get("MLFLOW_TRACKING_URI") or default)
        try:
            with _impatient():
                experiment_id = _open(uri, config.experiment, Path(root).absolute() / "mlflow")
        except UserError:
            raise
        except (MlflowException, sqlalchemy.exc.SQLAlchemyError, ImportError, OSError, ValueError) as error:
            raise UserError(f"tracking.uri: no MLflow store at {_public(uri)}: {_one_line(error)}") from error
        self.uri, self.experiment_id = uri, experiment_id
        # The registry is named too: otherwise mlflow makes a mlflow.db in the working directory for it.
        self._client = MlflowClient(tracking_uri=uri, registry_uri=uri)

    @property
    def ui_command(self) -> str:
        """What to type (or, for a server, where to look) to see the runs."""
        if self.uri.startswith("http"):
            page = f"#/experiments/{self.experiment_id}/runs?workflowType=machine_learning"  # else it opens on traces
            return f"{_public(self.uri).rstrip('/')}/{page}"
        return f"mlflow ui --backend-store-uri {shlex.quote(_public(self.uri))}"

    def start_run(
        self,
        name: str,
        *,
        key: str,
        parent: str | None = None,
        params: Mapping[str, Any] | None = None,
        tags: Mapping[str, Any] | None = None,
    ) -> str:
        """Start a run, or go on with the one of this key.

        Params are written when the run is made; if a later start brings others, they are not changed but the
        difference is kept in the tag draftlab.params_changed.

        Args:
            name: as the UI shows it.
            key: unique in the experiment, and the same again when the work is resumed.
            parent: run id of the parent, e.g. of the sweep.
            params: flat; longer values than MLflow keeps are cut, visibly.
            tags: more tags.

        Returns:
            The run id. The run is RUNNING and belongs to this process.
        """
        key = quote(key, safe="/ :=,.-_")  # MLflow's filters have no way to escape a quote
        given = {param: _cut(value, PARAM_LIMIT) for param, value in (params or {}).items()}
        all_tags = {**_provenance(), **_process(), **(tags or {}), "draftlab.key": key}
        if parent is not None:
            all_tags["mlflow.parentRunId"] = parent
        found = next(self._search(f"tags.`draftlab.key` = '{key}'"), None)
        if found is None:
            # With its tags at once: a run that is killed here is found again.
            run_id = self._client.create_run(self.experiment_id, run_name=name, tags=_tags(all_tags)).info.run_id
        else:
            run_id = found.info.run_id
            self._client.update_run(run_id, status="RUNNING")
            for tag in ("draftlab.reason", "draftlab.params_changed"):
                if tag in found.data.tags:
                    self._client.delete_tag(run_id, tag)
            kept = found.data.params
            if changed := [name for name in given if name in kept and kept[name] != given[name]]:
                all_tags["draftlab.params_changed"] = "; ".join(f"{k}: {kept[k]} -> {given[k]}" for k in changed)
            given = {name: value for name, value in given.items() if name not in kept}
            self._client.log_batch(run_id, tags=[RunTag(*tag) for tag in _tags(all_tags).items()])
        for chunk in _chunks([Param(*param) for param in given.items()], PARAMS_AT_ONCE):
            self._client.log_batch(run_id, params=chunk)
        return run_id

    @contextmanager
    def run(self, name: str, params: Mapping[str, Any] | None = None) -> Iterator[str]:
        """A run that nothing continues, and the end that the block comes to: FINISHED, KILLED by a signal, or FAILED
        with its error.

        Args:
            name, params: as in `start_run`.
        """
        run_id = self.start_run(name, key=f"{name}/{uuid.uuid4().hex}", params=params)
        try:
            yield run_id
        except BaseException as error:
            status = "KILLED" if isinstance(error, KeyboardInterrupt | SystemExit) else "FAILED"
            self.end_run(run_id, status, f"{type(error).__name__}: {error}")
            raise
        self.end_run(run_id, "FINISHED")

    def log_metrics(
        self,
        run_id: str,
        metrics: Mapping[str, float],
        step: int | None = None,
        *,
        model_id: str | None = None,
        dataset: tuple[str, str] | None = None,
    ) -> None:
        """Log values of one step.

        A value that is not finite is not logged, since it would hide the run from every filter and chart; the tag
        draftlab.nonfinite keeps the latest of them.

        Args:
            run_id: the run.
            metrics: name -> value.
            step: training step; None is 0.
            model_id: the checkpoint that the values belong to, too.
            dataset: (name, digest) of the data that they were measured on, as given to log_dataset.
        """
        step, now = step or 0, int(time.time() * 1000)
        name, digest = dataset or (None, None)
        finite = [
            Metric(key, float(value), now, step, model_id, name, digest, run_id)
            for key, value in metrics.items()
            if math.isfinite(value)
        ]
        for chunk in _chunks(finite, METRICS_AT_ONCE):
            self._client.log_batch(run_id, metrics=chunk)
        if broken := [f"{key}={value}" for key, value in metrics.items() if not math.isfinite(value)]:
            self._client.set_tag(run_id, "draftlab.nonfinite", _cut(f"step {step}: {', '.join(broken)}", TAG_LIMIT))

    def log_checkpoint(
        self,
        run_id: str,
        folder: Path,
        *,
        name: str,
        step: int,
        params: Mapping[str, Any],
        metrics: Mapping[str, float],
    ) -> str:
        """Keep a checkpoint as a logged model of the run, with its metrics linked to it.

        The same files under the same name are kept once, however often a resumed sweep comes by.

        Args:
            run_id: the run that made it.
            folder: its files, copied as they are.
            name: of the logged model; characters that MLflow refuses there become underscores.
            step: training step.
            params: flat.
            metrics: name -> value at that step.

        Returns:
            The model id; `models:/<model id>` names it everywhere.
        """
        name, digest = re.sub(r"[/:.%\"']", "_", name), _folder_digest(folder)
        for model in self._checkpoints(run_id):
            if (model.name, model.tags.get("draftlab.digest")) == (name, digest):
                return model.model_id
        model = self._client.create_logged_model(
            self.experiment_id,
            name=name,
            source_run_id=run_id,
            model_type="dflash-draft",
            params={key: _cut(value, PARAM_LIMIT) for key, value in params.items()},
            tags={"draftlab.step": str(step), "draftlab.digest": digest},
        )
        try:
            self._client.log_model_artifacts(model.model_id, str(folder))
        except BaseException:
            self._client.finalize_logged_model(model.model_id, "FAILED")
            raise
        self._client.finalize_logged_model(model.model_id, "READY")
        self._client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step=step)])
        self.log_metrics(run_id, metrics, step, model_id=model.model_id)
        return model.model_id

    def link_checkpoints(self, run_id: str, folders: Sequence[Path]) -> list[str | None]:
        """Link a run to the checkpoints that it used; the tag draftlab.training_runs names the runs that made them.

        Args:
            run_id: the run.
            folders: the checkpoints' files, wherever they stand now.

        Returns:
            Their model ids; None where this experiment has no such checkpoint.
        """
        models = []
        for folder in folders:
            query = f"tags.`draftlab.digest` = '{_folder_digest(folder)}'"
            found = self._client.search_logged_models([self.experiment_id], query, max_results=1)
            models.append(found[0] if found else None)
        if known := {model.model_id: model.source_run_id for model in models if model}:
            self._client.log_inputs(run_id, models=[LoggedModelInput(model_id) for model_id in known])
            self._client.set_tag(run_id, "draftlab.training_runs", ", ".join(dict.fromkeys(known.values())))
        return [model and model.model_id for model in models]

    def log_evaluations(
        self, run_id: str, evaluations: Mapping[str, Evaluation], prompts: str, folders: Mapping[str, Path], out: Path
    ) -> None:
        """Keep what evaluations found, linked to the checkpoints that they are of.

        Args:
            run_id: the run.
            evaluations: name -> evaluation; where there are several, their metrics begin with `NAME/`.
            prompts: what was asked for, as the source of the data.
            folders: draft -> its checkpoint's files.
            out: folder of the written results.
        """
        models = dict(zip(folders, self.link_checkpoints(run_id, list(folders.values()))))
        for name, found in evaluations.items():
            prefix = "" if len(evaluations) == 1 else re.sub(r"[^\w\-. /]", "_", name).strip("/") + "/"
            data = ("prompts", found.provenance["prompts_hash"])
            self.log_dataset(run_id, *data, source=prompts, context="evaluation")
            values = {prefix + key: value for key, value in found.metrics.items()}
            self.log_metrics(run_id, values, model_id=models[found.provenance["draft"]], dataset=data)
            self.log_table(run_id, found.prompts, f"{prefix}prompts.csv")
        self.log_artifacts(run_id, out)

    def log_dataset(self, run_id: str, name: str, digest: str, source: str, context: str) -> None:
        """Name the data that a run used.

        Args:
            run_id: the run.
            name: e.g. corpus.
            digest: hash of its content, at most 36 characters.
            source: where it came from.
            context: what it was used for, e.g. training or evaluation.
        """
        data = Dataset(name, digest, "local", source)
        self._client.log_inputs(run_id, [DatasetInput(data, [InputTag("mlflow.data.context", context)])])

    def log_artifacts(self, run_id: str, path: Path, into: str | None = None) -> None:
        """Keep a file, or all files of a folder, with the run; in its artifact folder `into`."""
        log = self._client.log_artifacts if Path(path).is_dir() else self._client.log_artifact
        log(run_id, str(path), into)

    def log_table(self, run_id: str, rows: list[dict[str, Any]], path: str) -> None:
        """Keep rows as a CSV, which the UI shows as a table; a later table of that path replaces it."""
        self._client.log_text(run_id, pd.DataFrame(rows).to_csv(index=False), path)

    def end_run(
        self,
        run_id: str,
        status: Literal["FINISHED", "FAILED", "KILLED"],
        reason: str | None = None,
        outcome: str | None = None,
    ) -> None:
        """End a run as what it was.

        Args:
            status: as MLflow knows it.
            reason: kept in the tag draftlab.reason.
            outcome: kept in the tag draftlab.status, where it says more than the status.
        """
        self._client.set_tag(run_id, "draftlab.status", outcome or status)
        if reason:
            self._client.set_tag(run_id, "draftlab.reason", _cut(reason, TAG_LIMIT))
        self._client.set_terminated(run_id, status)

    def resolve_checkpoint(self, ref: str, into: Path) -> Path | None:
        """Fetch the checkpoint that a reference names.

        Args:
            ref: a run id (its latest checkpoint), `models:/<model id>`, `models:/<name>/<version>` or
                `models:/<name>@<alias>`.
            into: folder to copy it into.

        Returns:
            The folder with the checkpoint's files; None if `ref` is no such reference.

        Raises:
            UserError: there is no such run or model in this store, or the run has no checkpoint.
        """
        try:
            if re.fullmatch(r"[0-9a-f]{32}", ref):
                run = self._client.get_run(ref)
                kept = self._checkpoints(ref, run.info.experiment_id)
                if not kept:
                    raise UserError(f"run {ref} ({run.info.run_name}) has no checkpoint in {_public(self.uri)}")
                model = max(kept, key=lambda one: (int(one.tags.get("draftlab.step", -1)), one.creation_timestamp))
                uri, label = model.artifact_location, model.model_id
            elif match := re.fullmatch(r"models:/+(.+)", ref):
                uri, label = self._model_location(match[1]), re.sub(r"\W+", "-", match[1])
            else:
                return None
            folder = Path(into) / label
            return Path(mlflow.artifacts.download_artifacts(uri, dst_path=str(folder), tracking_uri=self.uri))
        except (MlflowException, OSError) as error:
            raise UserError(f"checkpoint {ref!r}: not fetched from {_public(self.uri)}: {_one_line(error)}") from error

    def reconcile(self) -> int:
        """End the runs that a crash has left RUNNING: those whose process on this machine is gone, and the children
        of ended runs.

        Returns:
            How many were ended, as KILLED.
        """
        ended = 0
        for run in list(self._search("attributes.status = 'RUNNING'")):
            if "draftlab.key" in run.data.tags and _is_gone(run.data.tags):
                self.end_run(run.info.run_id, "KILLED", "its process is gone")
                ended += 1
        for run in list(self._search("attributes.status = 'RUNNING'")):
            parent = run.data.tags.get("mlflow.parentRunId")
            if "draftlab.key" in run.data.tags and parent and self._client.get_run(parent).info.status != "RUNNING":
                self.end_run(run.info.run_id, "KILLED", "its parent run has ended")
                ended += 1
        return ended

    def _search(self, query: str) -> Iterator[MlflowRun]:
        token = None
        while True:
            page = self._client.search_runs([self.experiment_id], query, max_results=500, page_token=token)
            yield from page
            if not (token := page.token):
                return

    def _checkpoints(self, run_id: str, experiment_id: str | None = None) -> list[LoggedModel]:
        found, token = [], None
        while True:
            page = self._client.search_logged_models(
                [experiment_id or self.experiment_id], f"source_run_id = '{run_id}'", max_results=50, page_token=token
            )
            found += [model for model in page if model.status == "READY"]
            if not (token := page.token):
                return found

    def _model_location(self, name: str) -> str:
        """The artifact location of `<model id>`, `<name>/<version>` or `<name>@<alias>`."""
        if "@" in name:
            version = self._client.get_model_version_by_alias(*name.rsplit("@", 1))
        elif "/" in name:
            version = self._client.get_model_version(*name.rsplit("/", 1))
        else:
            return self._client.get_logged_model(name).artifact_location
        source = self._client.get_model_version_download_uri(version.name, version.version)
        match = re.fullmatch(r"models:/(m-[0-9a-f]+)", source)
        return self._model_location(match[1]) if match else source


def _absolute(uri: str) -> str:
    """The URI, with a relative SQLite path made absolute: Ray's processes have other working directories."""
    if match := re.fullmatch(r"sqlite:///(.+)", uri):
        return f"sqlite:///{Path(match[1]).absolute()}"
    scheme = uri.partition(":")[0]
    if scheme in {"http", "https", "databricks"} or scheme.partition("+")[0] in {"postgresql", "mysql", "mssql"}:
        return uri
    raise UserError(f"tracking.uri: expected sqlite:///FILE, http(s)://SERVER or a database, got {_public(uri)!r}")


def _open(uri: str, experiment: str, folder: Path) -> str:
    """Make the store's database and experiment where they are missing; returns the experiment's id."""
    location = None  # a server chooses its own
    if uri.startswith("sqlite"):
        database = Path(uri.removeprefix("sqlite:///"))
        _make_database(database)
        location = (database.parent / "artifacts").as_uri()
    elif not uri.startswith(("http", "databricks")):
        location = (folder / "artifacts").as_uri()
    if location:
        # mlflow itself retries a database that doesn't open for minutes.
        options = {} if uri.startswith("sqlite") else {"connect_timeout": 8}
        engine = sqlalchemy.create_engine(uri, connect_args=options)
        sqlalchemy.inspect(engine).get_table_names()
        engine.dispose()
    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    found = client.get_experiment_by_name(experiment)
    if found is None:
        try:
            return client.create_experiment(experiment, artifact_location=location)
        except MlflowException:  # another process was faster
            found = client.get_experiment_by_name(experiment)
            if found is None:
                raise
    if found.lifecycle_stage != "active":
        raise UserError(f"tracking.experiment: {experiment!r} is deleted in {_public(uri)}; restore it or name another")
    return found.experiment_id


def _make_database(path: Path) -> None:
    """Make a SQLite store elsewhere and put it in place whole.

    Two processes that migrate one fresh database at once break each other ("duplicate column name").
    """
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".new-") as folder, _quiet_migrations():
        fresh = Path(folder) / path.name
        MlflowClient(tracking_uri=f"sqlite:///{fresh}").search_experiments(max_results=1)
        try:
            os.link(fresh, path)
        except FileExistsError:  # another process was faster, and its store is as good
            pass


@contextmanager
def _quiet_migrations() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("alembic", "mlflow.store.db.utils")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)


@contextmanager
def _impatient() -> Iterator[None]:
    """One short attempt per request: by default mlflow goes on for minutes with a server that isn't there."""
    short = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "8"}
    before = {name: os.environ.get(name) for name in short}
    os.environ.update(short)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@functools.cache
def _provenance() -> dict[str, str]:
    """Who, what and with which versions; the same for every run of a process."""
    tags = {**registry.resolve_tags(), "draftlab.version": __version__, "draftlab.python": platform.python_version()}
    for library in ("torch", "transformers", "ray", "mlflow"):
        tags[f"draftlab.{library}"] = metadata.version(library)
    here = Path(__file__)
    if _git(here.parent, "ls-files", here.name):  # else draftlab merely lies inside somebody's repository
        tags["mlflow.source.git.commit"] = _git(here.parent, "rev-parse", "HEAD")
        tags["draftlab.git_dirty"] = str(bool(_git(here.parent, "status", "--porcelain"))).lower()
    return tags


def _git(folder: Path, *command: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(folder), *command], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _process() -> dict[str, str]:
    """Tags that tell whether the process that owns a run still lives; the start time, since pids come back."""
    process = psutil.Process()
    return {
        "draftlab.host": socket.gethostname(),
        "draftlab.pid": str(process.pid),
        "draftlab.started": f"{process.create_time():.0f}",
    }


def _is_gone(tags: Mapping[str, str]) -> bool:
    if tags.get("draftlab.host") != socket.gethostname():
        return False
    try:
        process = psutil.Process(int(tags["draftlab.pid"]))
        same = abs(process.create_time() - float(tags["draftlab.started"])) < 5
        return not same or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _folder_digest(folder: Path) -> str:
    """SHA-256 of a folder's file names and contents."""
    result = hashlib.sha256()
    for path in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
        result.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                result.update(block)
    return result.hexdigest()


def _tags(tags: Mapping[str, Any]) -> dict[str, str]:
    return {tag: _cut(value, TAG_LIMIT) for tag, value in tags.items()}


def _chunks(items: list[Any], size: int) -> Iterable[list[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _cut(value: Any, limit: int) -> str:
    text = str(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _public(uri: str) -> str:
    """The URI without its password."""
    return re.sub(r"(?<=//)([^/@:]*):[^/@]*@", r"\1:***@", uri)


def _one_line(error: BaseException) -> str:
    """The error's text, without what requests and SQLAlchemy put around the cause."""
    text = " ".join(str(error).split())
    if match := re.search(r"\(Caused by (.*)\)$", text):
        text = match[1]
    return _cut(_public(text.partition(" [SQL:")[0]), 300)
