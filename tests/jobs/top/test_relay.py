"""The relay as a real process, with samplers, broken nodes, and a queue beside it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs.top.collect import send_relay
from jobs.top.queue_and_logs import LogTail
from jobs.top.snapshot import parse_snapshot
from jobs.worker.runtime.events import mark_of, render_event
from tests.jobs.top.samples import JOB, NodeProcess, running_rank, write_metrics

# A login to a worker runs its command here; node2 refuses, and node3 is silent.
SSH = """\
#!/bin/sh
case $3 in
  node2) echo "node2: Connection refused" >&2; exit 255 ;;
  node3) while read -r _; do :; done; exit ;;
esac
exec sh -c "$4"
"""
QUEUE = f"""\
#!/bin/sh
echo '12|{JOB}|RUNNING|5:01|2|64|node[0-1]|None'
echo 'squeue: warning'
echo '1|a|RUNNING|1:00|many|2|node1|None'
echo '13|a|b|PENDING|0:00|4|1||Resources'
"""
SCORES = {"metric": "f1", "score": 81.0, "best_score": 82.5, "best_step": 10}
REST = {"epoch": 0.5, "tokens_per_second": 9, "shares": {}}
"""More that a step's event has."""
Begin = Callable[..., NodeProcess]


@pytest.fixture
def begin(tmp_path: Path) -> Begin:
    """Starts a relay for some nodes, with our own ssh and squeue."""
    for name, text in (("ssh", SSH), ("squeue", QUEUE)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def begin(*nodes: str, **more: Any) -> NodeProcess:
        text = send_relay(nodes, 0.2, jobs=str(tmp_path / "spr-jobs"), **more).stdin
        return NodeProcess.start(text, path=tmp_path)

    return begin


def until(relay: NodeProcess, is_good: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Return the first line that meets a condition."""
    deadline = time.monotonic() + 60
    for line in relay:
        relay.send("\n")
        parse_snapshot(line, "the relay")  # what the laptop does with it
        found: dict[str, Any] = json.loads(line)
        if is_good(found):
            return found
        assert time.monotonic() < deadline, line
    raise AssertionError("the relay ended")


def errors(line: dict[str, Any]) -> dict[str, str]:
    return {node["name"]: node.get("error", "") for node in line["nodes"]}


def samplers(relay: NodeProcess) -> list[Path]:
    """Return the processes that a relay has started and that still run."""
    listed = Path(f"/proc/{relay.process.pid}/task").glob("*/children")
    return [Path("/proc", pid) for each in listed for pid in each.read_text().split()]


def is_running(process: Path) -> bool:
    """Return whether a process lives; this machine's init may take its time to bury a dead one."""
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_nodes_queue_and_logs_are_one_line_whatever_a_node_does(
    begin: Begin, tmp_path: Path
) -> None:
    write_metrics(tmp_path / "spr-jobs", 0, 30)
    step = {"step": 30, "total": 90, "loss": 2.5, "samples_per_second": 8.0, "eta_seconds": 7.5}
    events: list[dict[str, Any]] = [
        {"event": "phase", "name": "train"},
        {"event": "step", **step, **REST},
        {"event": "evaluation", "step": 20, "total": 90, **SCORES, "scores": {}, "best": False},
    ]
    log = "".join(f"{render_event(event, mark_of(JOB))}\n" for event in events)
    (tmp_path / "spr-jobs" / JOB / "log").write_text(f"a line\n{log}and another\n")
    (tmp_path / "spr-jobs" / JOB / "begin.json").write_text(
        '{"began": 990.5, "starts": [[900.5, 4], [990.5, 2]]}'
    )

    wanted = dict.fromkeys(("node0", "node1"), "")
    wanted |= {"node2": "node2: Connection refused", "node3": "connecting"}
    with running_rank(tmp_path / "spr-jobs", 0), begin(*wanted) as relay:
        found = until(relay, lambda line: errors(line) == wanted and line["queued"])

    assert [rank["step"] for node in found["nodes"][:2] for rank in node["ranks"]] == [30, 30]
    (job,) = found["jobs"]
    spent = {"spent_s": 90.0, "spent_usd": 0.0}
    assert 0 <= job.pop("age_s") < 60
    assert job == {"job": JOB, "phase": "train", "began": 990.5, **spent, **step, **SCORES}
    assert found["queue_error"] == ""
    row = {"id": "12", "name": JOB, "state": "RUNNING", "passed": "5:01", "nodes": 2, "cores": 64}
    assert found["queue"][0] == {**row, "where": "node[0-1]", "reason": "None"}
    assert [(row["name"], row["nodes"], row["reason"]) for row in found["queue"][1:]] == [
        ("a|b", 4, "Resources")
    ]


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (None, "no-squeue is not installed on the head"),
        ("echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1", "Unable"),
        ("exit 3", "no-squeue: ended with 3"),
        ("sleep 60", "no-squeue does not answer"),
    ],
)
def test_a_queue_that_can_not_be_asked_is_shown_as_such(
    begin: Begin, tmp_path: Path, script: str | None, error: str
) -> None:
    if script:
        (tmp_path / "no-squeue").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "no-squeue").chmod(0o755)
    # It is waited for as long as this says.
    (tmp_path / "timeout").write_text('#!/bin/sh\nshift\nexec /usr/bin/timeout 1 "$@"\n')
    (tmp_path / "timeout").chmod(0o755)

    with begin("node0", queue=["no-squeue"]) as relay:
        found = until(relay, lambda line: line["queue_error"] != "connecting")

    assert error in found["queue_error"]
    assert found["queue"] == []


@pytest.mark.parametrize("how", ["eof", "kill", "terminate"])
def test_nothing_that_it_started_outlives_it(begin: Begin, how: str) -> None:
    with begin("node0", "node1") as relay:
        until(relay, lambda line: not any(errors(line).values()))
        started = samplers(relay)
        assert len(started) >= 2
        if how == "eof":
            relay.close()
            assert relay.process.wait(60) == 0
        else:
            getattr(relay.process, how)()
            relay.process.wait(60)

        deadline = time.monotonic() + 60
        while any(map(is_running, started)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not any(map(is_running, started))


def test_a_log_keeps_its_last_step_when_other_lines_follow(tmp_path: Path) -> None:
    log = tmp_path / "log"
    tail = LogTail(str(log))
    assert tail.look(0.0) == {}

    event = {"step": 5, "total": 9, "loss": 1.0, "samples_per_second": 2.0, "eta_seconds": 3.0}
    log.write_text(render_event({"event": "step", **event, **REST}) + "\n")
    modified = log.stat().st_mtime
    assert tail.look(modified + 4) == {**event, "age_s": 4.0}

    with log.open("a") as file:
        file.write(
            "x" * 300_000 + '\n@spr {"event": "phase", "name": "evaluate"}\n@spr {"event": "st'
        )
    found = tail.look(log.stat().st_mtime)
    assert (found["step"], found["phase"]) == (5, "evaluate")
    with log.open("a") as file:
        file.write(render_event({"event": "step", **event, "step": 6, **REST}).partition("st")[2])
    assert tail.look(log.stat().st_mtime)["step"] == 6

    running = render_event({"event": "running"})
    log.write_text(f"{running}\n{'x' * 100_000}\n")  # the job was started again
    assert tail.look(log.stat().st_mtime) == {"phase": "running", "age_s": 0.0}
    done = {"event": "elements", "done": 37, "failed": 2, "total": 100}
    with log.open("a") as file:
        file.write(f"{render_event(done)}\n")
    assert tail.look(0.0)["phase"] == "37 of 100 done, 2 failed"
