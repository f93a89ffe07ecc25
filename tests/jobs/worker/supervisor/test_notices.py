"""Nodes that go while a job runs: the job saves a checkpoint, leaves them, and says why."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Any

import pytest

from cluster.slurm.job_queue import describe_reason
from jobs.places.launcher import JobEnd
from jobs.places.plan import JobPaths
from jobs.places.queue.history import list_jobs
from jobs.places.queue.slurm import SlurmLauncher
from jobs.worker.supervisor import transfers
from jobs.worker.supervisor.transfers import Copies, Transfer, Uploads
from tests.jobs.context import event
from tests.jobs.places import this_machine
from tests.jobs.places.this_machine import ThisMachine, submit, wait_for

SPOT = "spot: EC2 takes it back at 2026-11-22T18:30:00Z"
DISK = "disk: /home/ubuntu/spr-jobs has 3 MiB free"
# A program that saves a checkpoint when it is asked to end, and calls that a success.
SAVES = """trap 'echo kept > output/checkpoint; exit 0' TERM
touch ready; while :; do sleep 0.05; done
"""
TASK_SAVES = SAVES.replace("exit 0", "exit 143")


def drain(head: ThisMachine, node: str, reason: str) -> None:
    argv = ("scontrol", "update", f"nodename={node}", "state=drain", f"reason={reason}")
    head.slurm_command(*argv)


def follow(head: ThisMachine, paths: JobPaths) -> tuple[JobEnd, str]:
    end, lines, _ = this_machine.follow(head, paths)
    return end, "\n".join(lines)


def test_a_job_saves_a_checkpoint_and_leaves_a_node_that_goes(head: ThisMachine) -> None:
    """It has more time if its checkpoints take long."""
    head.connect("node1", "node2")
    said = event(event="checkpoint", step=7, name="step-000007", seconds=2.5)
    saves = SAVES.replace("echo kept", "sleep 4; echo kept")
    script = f"echo {shlex.quote(said)}; {saves}"
    paths = submit(head, script, nodes=2, retries=1, again=("echo", "resumed"))
    wait_for(Path(paths.root, "ready").exists)

    drain(head, "node1", SPOT)
    end, log = follow(head, paths)

    assert (end.state, end.attempt, end.nodes) == ("succeeded", 2, ("node0", "node2"))
    assert Path(paths.root, "output", "checkpoint").exists()
    why = "its node, node1, goes: EC2 takes it back at 2026-11-22T18:30:00Z"
    assert f"{why}; stopping" in log  # what a program saves is unknown
    assert f"attempt 1 ended: rank 1 on node1: {why}; the job will run again" in log
    assert log.endswith("resumed")


def test_without_retries_the_job_fails_soon_with_host_and_reason(head: ThisMachine) -> None:
    paths = submit(head, "trap '' TERM; touch ready; while :; do sleep 0.1; done", nodes=2)
    wait_for(Path(paths.root, "ready").exists)
    drain(head, "node1", DISK)
    begin = time.monotonic()

    end, _ = follow(head, paths)

    assert time.monotonic() - begin < 15
    assert (end.state, end.exit_code, end.rank, end.host) == ("failed", 137, 1, "node1")
    message = "its node, node1, has a full disk: /home/ubuntu/spr-jobs has 3 MiB free"
    assert end.message == message
    wait_for(lambda: head.processes(SLURM_JOB_ID="1") == [])


def test_a_node_that_somebody_drained_keeps_its_job(head: ThisMachine) -> None:
    head.connect("node1")
    paths = submit(head, "touch ready; sleep 1; echo done")
    wait_for(Path(paths.root, "ready").exists)
    drain(head, "node0", "spotless: slow fan")
    drain(head, "node1", DISK)  # of no concern to the job
    end, log = follow(head, paths)
    assert (end.state, log) == ("succeeded", "done")


def test_a_rank_that_can_not_write_has_a_full_disk_as_soon_as_slurm_says_so(
    head: ThisMachine,
) -> None:
    """The health check sees it seconds after the rank."""
    message = "metrics can't be written: No space left on device"
    error = event(event="error", message=message, rank=1, host="b", lost_peer=False)
    head.connect("node1", "node2")
    script = f"touch ready; echo {shlex.quote(error)}; printf 'a line that is cut o'; exit 1"
    paths = submit(head, script, nodes=2, retries=1)
    wait_for(Path(paths.root, "ready").exists)
    time.sleep(0.3)
    drain(head, "node1", DISK)

    end, log = follow(head, paths)

    text = "attempt 1 ended: rank 1 on node1: its node, node1, has a full disk"
    assert any(line.startswith("@spr ") and text in line for line in log.splitlines())
    # The second attempt has the same error on nodes with room, so it is the program's.
    assert (end.state, end.attempt, end.message) == ("failed", 2, message)


def test_a_job_that_waits_for_a_drained_node_says_for_which_and_what_to_do(
    head: ThisMachine,
) -> None:
    drain(head, "node1", DISK)
    paths = submit(head, "echo ran", nodes=3)
    wait_for(lambda: list_jobs(head)[0].waits_for.startswith("node1 "))

    (job,) = list_jobs(head)
    assert describe_reason(job.waits_for) == (
        "node1: /home/ubuntu/spr-jobs has 3 MiB free; free space there, and it returns to the "
        "queue by itself"
    )
    reasons = list[str]()

    def free(reason: str) -> None:
        reasons.append(reason)
        head.slurm_command("scontrol", "update", "nodename=node1", "state=resume")

    end = SlurmLauncher(head).follow(paths, lambda _: None, free)
    assert end.state == "succeeded"
    assert reasons[0] == f"node1 {DISK}"


def test_what_drained_nodes_mean_to_somebody_who_waits() -> None:
    assert describe_reason(f"node2 {SPOT}") == (
        "node2: EC2 takes it back at 2026-11-22T18:30:00Z; `spr-cluster repair` replaces it"
    )
    assert describe_reason("node2 slow: fan") == "node2: slow: fan; it is out of the queue"


def save(folder: Path, step: int) -> None:
    checkpoint = folder / f"output.state/checkpoints/step-{step:06d}"
    checkpoint.mkdir(parents=True)
    for name in ("checkpoint.json", "state.pt"):
        (checkpoint / name).write_text(f"{step}")


def settle(transfer: Transfer, step: int, now: float = 0.0) -> None:
    """Offer a checkpoint until it is there, or can't be brought there now."""
    transfer.turn(step, now)
    while not transfer.is_settled(step, now):
        time.sleep(0.01)
        transfer.turn(step, now)


@pytest.fixture
def folder(head: ThisMachine, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job's folder on this node, which can reach two others."""
    head.connect("node1", "node2")
    monkeypatch.setattr(transfers, "LOW_PRIORITY", "exec")
    monkeypatch.setitem(transfers._TAKEN, "low", "exec")
    for name, value in head.environ.items():
        monkeypatch.setenv(name, value)
    return head.home / "spr-jobs/squad-1"


def there(head: ThisMachine, node: str) -> list[str]:
    """Everything in a node's folder of copies."""
    found = head.root.glob(f"{node}/spr-jobs/squad-1/output.state/checkpoints/*")
    return sorted(path.name for path in found)


def test_incomplete_copies_do_not_count_and_are_removed(head: ThisMachine, folder: Path) -> None:
    copies = head.root / "node1/spr-jobs/squad-1/output.state/checkpoints"
    (copies / "step-000001.copy").mkdir(parents=True)
    for step in (2, 3):
        save(folder, step)
    # Rank 0 removed it meanwhile.
    (folder / "output.state/checkpoints/step-000003/checkpoint.json").unlink()

    settle(Copies(str(folder), ["node1"]), 3)
    assert there(head, "node1") == ["step-000003.copy"]
    settle(Copies(str(folder), ["node1"]), 2)
    assert there(head, "node1") == ["step-000002"]


def test_copies_go_to_a_node_that_stays(head: ThisMachine, folder: Path) -> None:
    gone = dict[str, Any]()
    copies = Copies(str(folder), ["node1", "node2"], lambda: gone)
    save(folder, 1)
    settle(copies, 1)
    assert there(head, "node1") == ["step-000001"]
    gone["node1"] = SPOT
    # No newer one is needed for that.
    settle(copies, 1)
    assert there(head, "node2") == ["step-000001"]
    save(folder, 2)
    settle(copies, 2)
    assert there(head, "node2") == ["step-000001", "step-000002"]
    assert there(head, "node1") == ["step-000001"]
    # Training removed it before it was copied: the newest one follows immediately, to the same node.
    copies.turn(3, 0.0)
    save(folder, 4)
    settle(copies, 4)
    assert there(head, "node2") == ["step-000002", "step-000004"]


def test_uploads_begin_with_the_inputs_and_are_tried_again_later(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = iter(["exit 1", "true", "exit 1", "true"])
    monkeypatch.setattr(transfers, "render_push", lambda *_: next(outcomes))
    launch: Any = None
    uploads, kept = Uploads(launch), list[int]()
    # No checkpoint at first; a later try needs time, unless it is the last.
    for newest, now in ((-1, 0), (-1, 14), (-1, 15), (7, 20), (7, 34)):
        settle(uploads, newest, now)
        kept.append(uploads.kept)
    assert kept == [-2, -2, -1, -1, -1]
    assert uploads.is_settled(7, 34)
    uploads.hurry()
    assert not uploads.is_settled(7, 34)
    settle(uploads, 7, 34)
    assert (uploads.kept, [*outcomes]) == (7, [])
    assert capsys.readouterr().out.count("can't be stored: exit code 1") == 1
