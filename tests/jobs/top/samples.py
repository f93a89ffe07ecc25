"""Snapshots of clusters of any size, metrics files, and programs for the nodes as processes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jobs.top.snapshot import Snapshot, parse_snapshot
from provision.run_on_nodes import SYSTEM_PYTHON

JOB = "squad-20260731-142501-k3f"
NOON = 1785499200.0
"""July 31, 2026, 12:00 UTC."""


def make_rank(rank: int, **more: Any) -> dict[str, Any]:
    return {
        "job": JOB,
        "rank": rank,
        "step": 1200,
        "loss": 1.25,
        "samples_per_second": 34.5,
        "communication": 0.12,
        "own_seconds": 0.43,
        "age_s": 2.0,
        **more,
    }


def make_node(index: int, ppn: int = 2, **more: Any) -> dict[str, Any]:
    ranks = [index * ppn + local for local in range(ppn)]
    own = {"job": JOB, "count": 24, "busy": 97}
    groups = [
        {"name": f"rank {r}", "ranks": [r], "cpus": f"{24 * i}-{24 * i + 23}", **own}
        for i, r in enumerate(ranks)
    ]
    groups.append({"name": "rest", "ranks": [], "cpus": "", "count": 48, "busy": 2.5})
    return {
        "name": f"node{index}",
        "busy": 50.2,
        "groups": groups,
        "memory": 512 * 10**9,
        "available": 400 * 10**9,
        "received": 1_100_000_000,
        "sent": 94_000_000,
        "ranks": [make_rank(rank) for rank in ranks],
        **more,
    }


def make_line(nodes: Sequence[dict[str, Any]], **more: Any) -> str:
    row = {"passed": "12:31", "nodes": len(nodes), "where": "", "reason": "None"}
    queue = [
        {**row, "id": "12", "name": JOB, "state": "RUNNING", "where": "node[0-9]", "cores": 960},
        {**row, "id": "13", "name": "run-1", "state": "PENDING", "reason": "Resources"},
    ]
    job = {"job": JOB, "phase": "train", "step": 1200, "total": 3400, "loss": 1.25}
    job |= {"metric": "macro_f1", "score": 81.0, "best_score": 82.5, "best_step": 800}
    figures = {
        "time": NOON,
        "cluster": "bert",
        "usd": 12.345,
        "ttl_left_s": 18720,
        "nodes": nodes,
        "jobs": [{**job, "samples_per_second": 412.3, "eta_seconds": 723, "age_s": 3}],
        "queue": queue,
        "queued": len(queue),
    }
    return json.dumps({**figures, **more})


def make_snapshot(nodes: int | Sequence[dict[str, Any]] = 3, **more: Any) -> Snapshot:
    listed = [make_node(i) for i in range(nodes)] if isinstance(nodes, int) else nodes
    return parse_snapshot(make_line(listed, **more), "sample")


def write_metrics(folder: Path, rank: int, steps: int, job: str = JOB, **more: Any) -> Path:
    """Write a rank's metrics file below the jobs' folder: ten steps a second of training."""
    path = folder / job / "output.state" / "metrics" / f"rank-{rank}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    seconds = {"data": 0.01, "forward": 0.03, "backward": 0.03, "communication": 0.02}
    row: dict[str, Any] = {"loss": 2.5, "lr": 0.1, "samples": 4, "tokens": 9, "padded": 12}
    row |= {"seconds": {**seconds, "optimizer": 0.01}, **more}
    lines = [json.dumps({"step": n, "time": n / 10, **row}) for n in range(1, steps + 1)]
    path.write_text("\n".join(lines) + "\n")
    return path


@contextmanager
def running_rank(folder: Path, rank: int, job: str = JOB) -> Iterator[None]:
    """Run a process that looks like a rank of a job below the jobs' folder."""
    path = folder / job
    path.mkdir(parents=True, exist_ok=True)
    environ = {"PATH": os.environ["PATH"], "PMI_RANK": str(rank)}
    with subprocess.Popen(["sleep", "infinity"], cwd=path, env=environ) as process:
        try:
            yield
        finally:
            process.kill()


@dataclass
class NodeProcess:
    """A program for the nodes as a process of this machine; a :class:`provision.host.Stream`."""

    process: subprocess.Popen[str]

    @classmethod
    def start(cls, text: str, path: Path | None = None) -> NodeProcess:
        """Start it with its standard input, which stays open. ``path`` comes first in PATH."""
        process = subprocess.Popen(
            SYSTEM_PYTHON,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PATH": f"{path}:{os.environ['PATH']}"} if path else None,
            # A sampler lowers the priority of its whole session, which would be that of all tests.
            start_new_session=True,
        )
        node = cls(process)
        node.send(text)
        return node

    def send(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text)
        self.process.stdin.flush()

    def __iter__(self) -> Iterator[str]:
        assert self.process.stdout is not None
        return (line.rstrip("\n") for line in self.process.stdout)

    def close(self) -> None:
        """End its standard input, as a broken connection does."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def __enter__(self) -> NodeProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        self.process.wait()


class Recorded:
    """A collector that plays two snapshots: one for the view's first two frames, and one for the others."""

    def __init__(self, *_: object) -> None:
        nodes = [make_node(index) for index in range(3)]
        self._snapshots = [make_snapshot(nodes, usd=usd) for usd in (1.5, 2.5)]
        self._frames = 0

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def first(self) -> Snapshot:
        return self._snapshots[-1]

    def latest(self) -> tuple[Snapshot, str]:
        self._frames += 1
        return self._snapshots[self._frames > 2], ""


def play_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.cli.top.Collector", Recorded)
    monkeypatch.setattr("jobs.cli.top._open_cluster", lambda _: None)
