"""The predictions of a job that loses the node of rank 0, which has its output."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from jobs.worker.corpus import coordinator, runner
from jobs.worker.corpus.coordinator import KEPT, Coordinator, run_digest
from jobs.worker.corpus.files import Output
from jobs.worker.corpus.options import PredictOptions, Shard
from jobs.worker.corpus.runner import ShardRunner
from jobs.worker.corpus.shards import Look

ROWS, COUNT = 200, 32


@dataclass
class Nodes:
    """Nodes by their names, each with a job's folder; one attempt after another has rank 0 elsewhere."""

    root: Path
    options: PredictOptions
    monkeypatch: pytest.MonkeyPatch
    is_later: bool = False

    def enter(self, node: str) -> Path:
        (self.root / node).mkdir(exist_ok=True)
        self.monkeypatch.chdir(self.root / node)
        self.monkeypatch.setenv("SLURMD_NODENAME", node)
        self.monkeypatch.setattr("socket.gethostname", lambda: node)
        return self.root / node

    def attempt(self, first: str, *others: str) -> dict[str, list[int]]:
        """Run the job, and return the first rows of the shards that each node computed."""
        computed = dict[str, list[int]]()
        self.enter(first)
        led = Coordinator(self.options, print, print, len(others) + 1, KEPT)
        in_turn = [*enumerate((first, *others))]
        # At first, rank 0 computes two shards; later, all join before it computes any.
        for number, node in reversed(in_turn) if self.is_later else in_turn:
            self.enter(node)
            self._work(led, first, number, computed.setdefault(node, []))
        self.enter(first)
        self.is_later = True
        assert led.rows == ROWS
        return computed

    def _work(self, led: Coordinator, first: str, number: int, computed: list[int]) -> None:
        def call(method: str, *arguments: Any) -> Any:
            if method == "ask" and len(computed) == 2 and not (self.is_later or number):
                return None
            here = Path.cwd().name
            self.enter(first)
            answer = getattr(led, method)(*arguments)
            self.enter(here)
            return answer

        def send(folder: Path, names: list[str], to: str, take: str) -> None:
            place = self.root / to / self.options.parts
            for part in place.glob("*.jsonl"):  # what an interrupted copy left
                (place / f".from-{number}").mkdir(exist_ok=True)
                (place / f".from-{number}" / part.name).write_text("half")
            there = take.replace(str(Path.cwd()), str(self.root / to))
            script = f"tar -C {folder} -cf - {' '.join(names)} | ({there})"
            subprocess.run(["sh", "-c", script], check=True)
            assert not [*place.glob(".*")]

        def run(shard: Shard, output: Output) -> dict[str, Any]:
            computed.append(shard.first)
            count = min(shard.count, ROWS - shard.first)
            name = f"{shard.name}-{count}-{count}.jsonl" if count > 0 else ""
            if name:
                with output.writing(name, Path("inputs")) as target:
                    target.write_text("{}\n" * count)
            rows = {"read": max(0, count), "rows": max(0, count), "name": name, "expected": ROWS}
            more = {"problem": "", "cut": 0, "seconds": 1.0, "core_seconds": 1.0}
            return {**rows, **more}

        self.monkeypatch.setattr(runner, "send_below", send)
        stop = SimpleNamespace(requested=False)
        rank = SimpleNamespace(remote=SimpleNamespace(call=call), stop=stop)
        rank.identity = SimpleNamespace(rank=number)
        work = ShardRunner(cast(Any, rank), self.options)
        self.monkeypatch.setattr(work, "_run", run)
        work.run_all()


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    data = tmp_path / "in.jsonl"
    data.write_text('{"text": "a"}\n' * ROWS)
    task = SimpleNamespace(name="classify")
    monkeypatch.setattr(coordinator, "find_task", lambda _: task)
    monkeypatch.setattr(coordinator, "look_at", lambda *_: Look((), COUNT))
    options = PredictOptions("model", str(data), str(tmp_path / "out.jsonl"))
    return Nodes(tmp_path, options, monkeypatch)


@pytest.mark.parametrize(
    ("is_lost", "second", "again"),
    [
        (True, ("b", "c"), [0, 32]),
        (True, ("c", "b"), [0, 32]),
        (False, ("b", "a"), []),
        (False, ("c", "b", "a"), []),
    ],
    ids=["worker leads", "new node leads", "order changes", "grows"],
)
def test_only_what_the_lost_node_computed_is_computed_again(
    nodes: Nodes, is_lost: bool, second: tuple[str, ...], again: list[int]
) -> None:
    first = nodes.attempt("a", "b")
    assert (first["a"], first["b"][:2]) == ([0, 32], [64, 96])

    if is_lost:
        shutil.rmtree(nodes.root / "a")
    found = nodes.attempt(*second)

    assert sorted(each for some in found.values() for each in some if each < ROWS) == again
    parts = sorted((nodes.root / second[0] / nodes.options.parts).glob("*.jsonl"))
    assert sum(len(path.read_text().splitlines()) for path in parts) == ROWS


def test_predictions_of_earlier_releases_count() -> None:
    assert run_digest(PredictOptions("model", "in.csv", "out"), COUNT, ()) == "9d81457463d3"
