"""A real MLflow server on this machine's loopback, and what it knows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_START_S = 120


def server_argv(folder: Path, port: int) -> list[str]:
    """Return the command of a server whose database is in ``folder``."""
    argv = [sys.executable, "-m", "mlflow", "server", "--host=127.0.0.1", f"--port={port}"]
    argv += [f"--backend-store-uri=sqlite:///{folder}/mlflow.db", "--workers=1"]
    return [*argv, f"--artifacts-destination={folder}/artifacts"]


@contextmanager
def running(argv: Sequence[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server, and end it with its own processes. Its output is in ``folder``."""
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(
            argv,
            cwd=folder,
            env={**os.environ, **quiet},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            yield server
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def wait_until_ready(port: int) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except OSError:
            assert time.monotonic() < deadline, "the MLflow server does not start"
            time.sleep(0.2)


def ask(port: int, method: str, **fields: object) -> Any:
    """Call a method of the server's API, such as ``runs/search``."""
    data, kind = json.dumps(fields).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/api/2.0/mlflow/{method}", data, kind)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def as_dict(pairs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a run's parameters, metrics, or tags by name."""
    return {each["key"]: each["value"] for each in pairs}
