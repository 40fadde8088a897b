"""Shared fixtures, and an environment in which tests neither phone home nor touch anybody's tracking server."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: tests are small, cores are shared
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # likewise: what they expect are a CPU's numbers and shares
os.environ.pop("MLFLOW_TRACKING_URI", None)
os.environ.pop("MLFLOW_RUN_ID", None)
os.environ.update(MLFLOW_DISABLE_TELEMETRY="true", DO_NOT_TRACK="true", RAY_USAGE_STATS_ENABLED="0")

from draftlab import config, tracking  # noqa: E402


@pytest.fixture(scope="session")
def migrated_database(tmp_path_factory):
    """An empty MLflow database; a fresh one costs seconds of migrations, a copy nothing."""
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    tracking._make_database(path)
    return path


@pytest.fixture
def outputs(tmp_path, migrated_database):
    """An outputs folder whose default tracking store is there already."""
    folder = tmp_path / "outputs"
    (folder / "mlflow").mkdir(parents=True)
    shutil.copy(migrated_database, folder / "mlflow" / "mlflow.db")
    return folder


@pytest.fixture
def store(outputs):
    """A tracking store of the test's own."""
    return tracking.Store(config.TrackingConfig(), outputs)


@pytest.fixture
def tiny_run(outputs):
    """A run for the tiny target, tracked in the test's own store."""
    run = config.load(config.CONFIGS / "tiny.yaml")
    return run.replace({"tracking.uri": f"sqlite:///{outputs}/mlflow/mlflow.db"})


@dataclass(frozen=True)
class Swept:
    """A sweep that was run to its end."""

    folder: Path
    tracking_uri: str
    said: str
    """What it printed."""


@pytest.fixture(scope="session")
def swept(tmp_path_factory, migrated_database):
    """`python experiments/sweep_block_size.py` on the tiny target, run once: it takes most of a minute."""
    from experiments import sweep_block_size

    home = tmp_path_factory.mktemp("swept")
    shutil.copy(migrated_database, home / "mlflow.db")
    uri, folder = f"sqlite:///{home}/mlflow.db", home / "sweep"
    tiny = ["--config", str(config.CONFIGS / "tiny.yaml"), "cluster.cpus=2", f"tracking.uri={uri}"]
    with redirect_stdout(StringIO()) as said:
        assert sweep_block_size.main([*tiny, "--block-sizes", "2,4", "--out", str(folder)]) == 0, said.getvalue()
    return Swept(folder, uri, said.getvalue())


def free_port():
    """A port of this machine that nobody listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def serve(uri, folder):
    """A real `mlflow server` over a store, for as long as the context is open; gives its URL, its log is in folder."""
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri, "--port", str(port)]
    command += ["--workers", "1", "--artifacts-destination", str(folder / "served")]
    log = folder / "server.log"
    with log.open("w") as file:
        server = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_for(f"{url}/health", server, log)
        yield url
    finally:
        os.killpg(server.pid, signal.SIGTERM)  # its workers too
        server.wait(20)


def _wait_for(url, server, log, seconds=180):
    end = time.monotonic() + seconds
    while time.monotonic() < end and server.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"mlflow server did not start:\n{log.read_text()}")
