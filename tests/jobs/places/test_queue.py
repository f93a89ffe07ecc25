"""Jobs through the queue: submitted, followed, cancelled, and run again, in this machine's bash."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from infra.errors import HostError, HostKeyError, JobError, UsageError
from jobs.places.files import place_files, worker_files
from jobs.places.launcher import parse_end
from jobs.places.plan import STOP_SECONDS, JobPaths
from jobs.places.queue import slurm as queue
from jobs.places.queue.history import list_jobs
from jobs.places.queue.slurm import SlurmLauncher
from jobs.worker.supervisor.commands import IDLE
from jobs.worker.supervisor.launch import SECRETS
from provision.on_node.keeper import render_finish
from tests.fakes import marked
from tests.jobs.context import event
from tests.jobs.places.this_machine import (
    NODES,
    ThisMachine,
    follow,
    is_gone,
    read_soon,
    submit,
    wait_for,
)


def test_a_job_is_followed_until_it_ends(head: ThisMachine) -> None:
    paths = submit(head, 'for i in 1 2 3; do echo "$GREETING $i"; sleep 0.2; done; exit 7')

    end, lines, _ = follow(head, paths)

    assert lines == ["it's me 1", "it's me 2", "it's me 3"]
    assert (end.state, end.exit_code, end.nodes, end.attempt) == ("failed", 7, ("node0",), 1)
    assert end.seconds is not None
    assert 0.4 < end.seconds < 10
    wait_for(lambda: head.jobs_in_queue() == [])
    assert SlurmLauncher(head).cancel(paths, STOP_SECONDS) == ()
    assert follow(head, paths)[0] == end, "it keeps its end"


def test_a_broken_connection_loses_neither_the_job_nor_a_line(head: ThisMachine) -> None:
    head.drop_after = [1, 2]
    paths = submit(head, "for i in 1 2 3 4 5; do echo line $i; sleep 0.2; done")

    end, lines, _ = follow(head, paths)

    assert end.state == "succeeded"
    assert [line for line in lines if line.startswith("line")] == [f"line {i}" for i in range(1, 6)]
    assert sum("the job may still be running" in line for line in lines) == 2


def test_a_follower_that_is_gone_leaves_nothing_on_the_head(head: ThisMachine) -> None:
    paths = submit(head, "echo begun; sleep 60")
    read_soon(Path(paths.log))
    before = set(head.processes())
    head.drop_after = [1]
    head.gone = "the test has ended"

    with pytest.raises(JobError):
        follow(head, paths)

    wait_for(lambda: set(head.processes()) <= before)


def test_a_head_that_is_gone_for_good_is_not_waited_for(head: ThisMachine) -> None:
    paths = submit(head, "sleep 20")
    head.gone = "i-0a is terminated"
    head.refuse = HostError("node0", "no SSH")

    with pytest.raises(JobError, match="squad-1 ended with its head node: i-0a is terminated"):
        follow(head, paths)
    head.refuse = HostKeyError("node0", "another key")
    with pytest.raises(HostKeyError):
        follow(head, paths)
    head.refuse = None
    with pytest.raises(JobError, match="job squad-9 is gone: it left the queue without"):
        follow(head, JobPaths("squad-9", str(head.home)))


def test_the_head_gets_log_and_results_of_a_job_on_other_nodes(head: ThisMachine) -> None:
    head.connect("node1", "node2")
    submit(head, "sleep 60", "first")
    script = "echo begun; touch output/results.json; sleep 0.5; echo -n without an end"
    paths = submit(head, script, "second", nodes=2)

    end, lines, _ = follow(head, paths)

    assert (end.state, end.nodes) == ("succeeded", ("node1", "node2"))
    assert lines == ["begun", "without an end"]
    assert Path(paths.root, "output", "results.json").exists()
    assert [(job.state, job.nodes) for job in list_jobs(head)][1] == ("succeeded", end.nodes)


def test_a_node_that_missed_the_submission_gets_the_launch(head: ThisMachine) -> None:
    head.connect("node1")
    for node in ("node0", "node1", "node2"):
        head.slurm_command("scontrol", "update", f"nodename={node}", "state=down")
    paths = submit(head, "echo begun")
    launch = head.root / "node1" / paths.relative_root / "launch.json"
    sent = launch.read_bytes()
    launch.write_bytes(b"{}")
    head.slurm_command("scontrol", "update", "nodename=node1", "state=resume")

    end, lines, _ = follow(head, paths)

    assert (end.state, end.nodes, lines) == ("succeeded", ("node1",), ["begun"])
    assert launch.read_bytes() == sent == Path(paths.root, "launch.json").read_bytes()
    assert launch.stat().st_mode & 0o777 == 0o600


def test_a_folder_sees_several_runs(head: ThisMachine) -> None:
    """Those of a study, and of a job that is resumed."""
    paths = submit(head, "echo the first; exit 1")
    follow(head, paths)
    Path(paths.root, "cancelled").touch()
    end, lines, _ = follow(head, submit(head, "echo the second"))
    assert (end.state, lines) == ("succeeded", ["the second"])
    assert not Path(paths.root, "cancelled").exists(), "its next loss would end it as cancelled"
    paths = submit(head, "echo the third; sleep 60")

    read_soon(Path(paths.log))
    assert Path(paths.root, "log.earlier").read_text() == "the first\nthe second\n"
    assert [job.state for job in list_jobs(head)] == ["running"]


def test_a_job_that_two_commands_resume_at_once_is_queued_once(head: ThisMachine) -> None:
    def stamps() -> dict[str, int]:
        return {each.name: each.stat().st_mtime_ns for each in Path(paths.root).iterdir()}

    paths = submit(head, "exit 1")
    follow(head, paths)
    for name in NODES:  # so that nothing else changes the folder
        head.slurm_command("scontrol", "update", f"nodename={name}", "state=down")
    sbatch = (head.bin / "sbatch").read_text()
    head.write_program("sbatch", sbatch.replace("exec", "sleep 0.5; exec"))
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(submit, head, "true", resumed_job="squad-1") for _ in range(2)]
    (refused,) = (error for each in asked if (error := each.exception()))

    assert isinstance(refused, UsageError)
    assert refused.message == "job squad-1 is queued or running already"
    assert refused.hint == "to follow it: spr-cluster attach squad-1"
    assert head.jobs_in_queue() == [("squad-1", "PENDING")]
    before = stamps()
    with pytest.raises(UsageError, match="queued or running already"):
        submit(head, "true", resumed_job="squad-1")
    assert stamps() == before


def test_a_job_that_the_queue_refuses_leaves_all_nodes_as_they_were(head: ThisMachine) -> None:
    def look() -> dict[Path, bytes]:
        jobs = [path / "spr-jobs/squad-1" for path in (head.home, there)]
        return {each: each.read_bytes() for job in jobs for each in job.glob("*") if each.is_file()}

    there = head.connect("node1")
    paths = submit(head, "echo begun; exit 1")
    follow(head, paths)
    wait_for(lambda: "end.json" in {path.name for path in look() if there in path.parents})
    Path(paths.record).write_text("before")
    before, sbatch = look(), (head.bin / "sbatch").read_text()
    head.write_program("sbatch", "#!/bin/sh\necho refused >&2; exit 1")

    for job in ("squad-1", "squad-2"):
        Path(JobPaths(job, home=str(head.home)).root).mkdir(exist_ok=True)
        Path(paths.uploaded("job.json")).write_text("after")
        resumed = "squad-1" if job == "squad-1" else ""
        with pytest.raises(JobError) as error:
            submit(head, "true", job, resumed_job=resumed, variables=("A=b",))
        assert error.value.message == f"the queue did not take job {job}: refused"
        Path(paths.uploaded("job.json")).unlink(missing_ok=True)
    assert look() == before

    head.write_program("sbatch", sbatch)
    Path(paths.root, "log.earlier").mkdir()
    with pytest.raises(JobError, match="Is a directory"):
        submit(head, "true", resumed_job="squad-1", variables=("A=b",))
    assert (look(), head.jobs_in_queue()) == (before, [])
    Path(paths.root, "log.earlier").rmdir()
    Path(paths.uploaded("job.json")).write_text("after")
    end, _, _ = follow(head, submit(head, "true", resumed_job="squad-1"))
    assert Path(paths.record).read_text() == "after"
    assert end.state == "succeeded"
    assert Path(paths.root, "log.earlier").read_text() == "begun\n"


def test_a_release_that_the_controller_forgets_is_repeated(head: ThisMachine) -> None:
    submit(head, "until [ -e ../go ]; do sleep 0.05; done", "first", nodes=3)
    paths, queued = submit(head, "echo begun", "second"), head.slurm / "queue"
    wait_for(lambda: '"Resources"' in queued.read_text())
    with (head.slurm / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        forgotten = queued.with_name("forgotten")
        forgotten.write_text(queued.read_text().replace('"Resources"', '"JobHeldUser"'))
        forgotten.replace(queued)
    (head.home / "spr-jobs/go").touch()
    assert follow(head, paths)[0].state == "succeeded"


def test_a_job_is_released_without_the_command_that_submits_it(head: ThisMachine) -> None:
    """All that it needs to start is on the head before the other nodes get theirs."""
    there = head.connect("node1") / "spr-jobs/squad-1"
    follow(head, submit(head, "true"))
    head.write_program(
        "timeout", 'touch ~/sends; until [ -e ~/go ]; do sleep 0.05; done; shift; exec "$@"'
    )
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(submit, head, "echo again", resumed_job="squad-1")
        wait_for((head.home / "sends").exists)
        paths = JobPaths("squad-1", str(head.home))
        assert not Path(paths.end).exists()
        for pid in head.processes():
            with suppress(OSError):  # it has ended meanwhile
                if b"# submitting a job" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
        assert isinstance(asked.exception(), JobError)
    assert head.jobs_in_queue() == [("squad-1", "PENDING")]
    (head.home / "go").touch()
    end, lines, _ = follow(head, paths)
    assert (end.state, lines) == ("succeeded", ["again"])
    names = ("launch.json", "run.sh")
    assert [*map(Path.read_bytes, (there / each for each in names))] == [
        Path(paths.root, each).read_bytes() for each in names
    ]
    assert not [*there.glob("*.???")]


def test_the_first_start_is_known_on_all_nodes_and_counts_on_a_new_head(head: ThisMachine) -> None:
    there = head.connect("node1") / "spr-jobs/squad-1/first.json"
    paths = submit(head, "sleep 1")
    follow(head, paths)
    begin = Path(paths.root, "begin.json")
    first = json.loads(begin.read_text())["first"]
    assert json.loads(there.read_text()) == {"first": first, "starts": [[first, 1]]}

    Path(paths.root, "first.json").write_text('{"first": 5.0, "starts": [[5.0, 3]]}')
    for each in (begin, Path(paths.end)):
        each.unlink()
    head.run(f"cd {paths.root} && sbatch --parsable run.sh")  # as `repair` after the head's loss
    follow(head, paths)
    kept = json.loads(begin.read_text())
    assert (kept["first"], kept["starts"]) == (5.0, [[5.0, 3], [kept["began"], 1]])

    follow(head, submit(head, "true"))
    assert json.loads(begin.read_text())["first"] > 5.0, "it was submitted again"


# A second attempt


def test_a_requeued_job_is_shown_as_one(head: ThisMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "requeue_s", 60)
    paths = submit(head, "kill -KILL $$", retries=1)
    wait_for(lambda: head.jobs_in_queue() == [("squad-1", "PENDING")])

    (found,) = list_jobs(head)

    assert (found.state, found.waits_for, found.attempt) == ("requeued", "BeginTime", 1)
    assert not Path(paths.end).exists()
    assert SlurmLauncher(head).cancel(paths, STOP_SECONDS) == ()
    assert [(job.state, job.attempt) for job in list_jobs(head)] == [("cancelled", 1)]


def test_the_reason_for_a_wait_never_falls_into_a_line(head: ThisMachine) -> None:
    """A job that was requeued may have a long log, of which a slow connection takes only parts."""
    head.requeue_s = 60
    again = ("bash", "-c", "echo '@queue-00 is no word of the queue'")
    paths = submit(head, "seq -f 'line %.0f' 50000; exit 9", retries=1, again=again)
    wait_for(lambda: head.jobs_in_queue() == [("squad-1", "PENDING")])
    lines, reasons = list[str](), list[str]()

    def take(line: str) -> None:
        lines.append(line)
        if len(lines) % 10_000 == 0:
            time.sleep(0.2)

    def note(reason: str) -> None:
        reasons.append(reason)
        if len(lines) >= 50_000:
            head.slurm_command("scontrol", "update", "jobid=1", "starttime=now")

    end = SlurmLauncher(head).follow(paths, take, note)

    assert end.attempt == 2
    assert set(reasons) == {"BeginTime"}
    text = [line for line in lines if not line.startswith("@spr ")]
    assert text[:-1] == [f"line {number}" for number in range(1, 50_001)]
    assert text[-1] == "@queue-00 is no word of the queue"


def test_an_error_of_the_program_is_not_tried_again(head: ThisMachine) -> None:
    error = event(event="error", message="NaN", rank=1, host="b", lost_peer=False, exit_code=3)
    lost = event(event="error", message="peer gone", rank=0, host="a", lost_peer=True)
    end, _, _ = follow(head, submit(head, f"echo '{lost}'; echo '{error}'; exit 9", retries=2))
    assert (end.state, end.exit_code, end.attempt) == ("failed", 3, 1)
    assert (end.rank, end.host, end.message) == (1, "b", "NaN")


def test_a_killed_program_is_tried_again_whatever_others_say_of_it(head: ThisMachine) -> None:
    killed = event(
        event="error", message="killed", rank=1, host="b", lost_peer=False, exit_code=137
    )
    other = event(event="error", message="EOF", rank=0, host="a", lost_peer=False, exit_code=1)
    script = f"echo begun; echo '{killed}'; echo '{other}'; exit 137"
    end, lines, _ = follow(head, submit(head, script, retries=1, again=("echo", "resumed")))
    assert (end.state, end.attempt) == ("succeeded", 2)
    assert any("killed; the job will run again" in line for line in lines)


@pytest.mark.parametrize("lost", ["node0", "node1"], ids=["its first node", "another one"])
def test_a_job_that_loses_a_node_runs_on_others(head: ThisMachine, lost: str) -> None:
    head.connect("node1", "node2")
    paths = submit(head, "echo begun; sleep 60", nodes=2, retries=1, again=("echo", "resumed"))
    read_soon(Path(paths.log))

    head.slurm_command("scontrol", "update", f"nodename={lost}", "state=down")
    end, lines, _ = follow(head, paths)

    assert (end.state, end.attempt, len(end.nodes)) == ("succeeded", 2, 2)
    assert lost not in end.nodes
    assert (lines[0], lines[-1]) == ("begun", "resumed")


@pytest.mark.parametrize("retries", [2, 3])
def test_an_elastic_job_goes_on_with_fewer_nodes_and_again_with_all(
    head: ThisMachine, retries: int
) -> None:
    head.connect("node1", "node2")
    submit(head, "sleep 60", "other")
    # Where it is to start again, it is stopped, however busy this machine is.
    seconds = 5 if retries == 2 else 60
    alone = f"case $SLURM_JOB_NODELIST in node1) sleep {seconds} & wait; esac"
    alone = f"trap 'exit 0' TERM; {alone}"
    again = ("bash", "-c", f"echo on $SLURM_JOB_NODELIST of $SPR_PLANNED_RANKS; {alone}")
    more: dict[str, Any] = {"planned_nodes": 2, "retries": retries, "again": again}
    paths = submit(head, "echo begun; sleep 60", nodes=2, least=1, **more)
    wait_for(lambda: "begun" in Path(paths.log).read_text())

    head.slurm_command("scontrol", "update", "nodename=node2", "state=down")
    wait_for(lambda: "on node1 of 2" in Path(paths.log).read_text())
    head.slurm_command("scontrol", "update", "nodename=node2", "state=resume")
    end, lines, _ = follow(head, paths)

    assert end.state == "succeeded"
    assert [nodes for _, nodes in end.starts] == [2, 1, 2][: end.attempt]
    if retries == 2:  # its last restart is kept for a loss
        assert end.nodes == ("node1",)
        return
    assert (end.nodes, lines[-1]) == (("node1", "node2"), "on node1,node2 of")
    text = "attempt 2 ended: rank 0 on node1: node2 can be used again"
    assert text in Path(paths.log).read_text()


def test_no_node_is_spare_that_a_waiting_job_could_use(head: ThisMachine) -> None:
    head.connect("node1", "node2")
    submit(head, "sleep 60", "one")
    assert head.run(shlex.join(IDLE)).stdout.split() == ["node1", "node2"]
    submit(head, "sleep 60", "all", nodes=3)
    assert head.run(shlex.join(IDLE), check=False).stdout == ""


def test_a_job_whose_first_node_is_lost_for_the_last_time_has_failed_with_it(
    head: ThisMachine,
) -> None:
    head.connect("node1")
    paths = submit(head, "echo begun; sleep 60", retries=1, again=("sleep", "60"))
    read_soon(Path(paths.log))
    head.slurm_command("scontrol", "update", "nodename=node0", "state=down")
    wait_for(lambda: '"attempt": 2' in Path(paths.root, "begin.json").read_text())

    head.slurm_command("scontrol", "update", "nodename=node1", "state=down")
    wait_for(lambda: head.jobs_in_queue() == [])
    assert [job.state for job in list_jobs(head)] == ["lost"]
    keep(head, "1", "NODE_FAIL")

    end, _, _ = follow(head, paths)
    assert (end.state, end.exit_code, end.nodes) == ("failed", 137, ("node1",))
    assert end.cause == "one of its nodes went down before node1, the first, recorded the end"


def test_the_end_is_written_before_slurm_kills(head: ThisMachine) -> None:
    hanging = head.connect("node1") / "hangs"
    paths = submit(head, "echo begun; sleep 60", nodes=2)
    read_soon(Path(paths.log))

    hanging.touch()
    head.slurm_command("scontrol", "update", "nodename=node1", "state=down")

    end, _, _ = follow(head, paths)
    assert end.state == "failed"
    assert end.cause == "rank 1 on node1: its node, node1, is down or cut off"


@pytest.mark.parametrize("requeues", [False, True])
def test_a_job_that_loses_a_node_after_its_end_has_succeeded(
    head: ThisMachine, *, requeues: bool
) -> None:
    head.connect("node1", "node2")
    if requeues:
        scontrol = (head.bin / "scontrol").read_text()
        refuse = 'case "$*" in *requeue=0*) exit 1 ;; esac'
        head.write_program("scontrol", scontrol.replace("exec", f"{refuse}\nexec", 1))
    command = "[ -e finishing ] || { touch finishing; sleep 60; }"
    paths = submit(head, "echo trained", nodes=2, retries=1, on_finish=command)
    wait_for(Path(paths.root, "finishing").exists)

    head.slurm_command("scontrol", "update", "nodename=node1", "state=down")

    wait_for(lambda: head.jobs_in_queue() == [])
    end, lines, _ = follow(head, paths)
    assert (end.state, end.attempt) == ("succeeded", 1)
    assert lines.count("trained") == 1


def test_a_success_stays_one_if_the_first_node_is_lost_while_it_is_stored(
    head: ThisMachine,
) -> None:
    head.connect("node1")
    head.slurm_command("scontrol", "update", "nodename=node0", "state=down")
    command = "echo $SPR_STATE >> said; [ -e again ] || { touch again; sleep 60; }"
    paths = submit(head, "echo trained", on_finish=command)
    wait_for(Path(paths.root, "again").exists)

    head.slurm_command("scontrol", "update", "nodename=node1", "state=down")
    wait_for(lambda: head.jobs_in_queue() == [])
    assert not Path(paths.end).exists()
    keep(head, "1", "NODE_FAIL")

    end, lines, _ = follow(head, paths)
    assert (end.state, end.exit_code, end.nodes) == ("succeeded", 0, ("node1",))
    assert lines.count("trained") == 1
    assert Path(paths.root, "said").read_text() == "succeeded\n" * 2


def test_an_attempt_that_finds_an_outcome_brings_the_job_to_its_whole_end(
    head: ThisMachine,
) -> None:
    there = head.connect("node1", "node2") / "spr-jobs/squad-1/end.json"
    for name in NODES:
        head.slurm_command("scontrol", "update", f"nodename={name}", "state=down")
    paths = submit(head, "echo again")
    outcome = {"state": "failed", "exit_code": 0, "nodes": ["node0"]}
    Path(paths.root, "begin.json").write_text(json.dumps({"attempt": 1, "outcome": outcome}))
    head.slurm_command("scontrol", "update", "nodename=node1", "state=resume")

    end, lines, _ = follow(head, paths)

    assert end.state == "failed"
    assert [json.loads(line[14:])["text"] for line in lines] == [
        "the job had ended before Slurm lost one of its nodes"
    ]
    assert json.loads(there.read_text()) == outcome


# Hangs


def test_a_job_whose_rank_has_failed_ends_within_a_bounded_time(head: ThisMachine) -> None:
    failed = event(event="error", message="lost contact", rank=0, host="a", lost_peer=True)
    hangs = "trap '' TERM; setsid sleep 300 & echo $! > waiting; wait"

    end, _, _ = follow(head, submit(head, f"echo '{failed}'; {hangs}"))

    assert (end.state, end.exit_code, end.message) == ("failed", 137, "lost contact")
    assert is_gone(int((Path(head.home) / "spr-jobs/squad-1/waiting").read_text()))


@pytest.mark.parametrize(
    ("said", "has_ranks"),
    [
        ("[mpiexec@node0] HYD_sock_write: error launching processes", False),
        ("[mpiexec@node0] Error: Downstream from host node1 exited abnormally", True),
    ],
)
def test_mpirun_that_waits_without_ranks_is_ended(
    head: ThisMachine, said: str, has_ranks: bool
) -> None:
    """What a program prints ends no job: its ranks are there."""
    spin = "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done"
    rank = f"export PMI_RANK=0; exec sh -c \"{spin}; echo '{said}'; sleep 3\"".replace("$", "\\$")
    end, lines, _ = follow(head, submit(head, rank if has_ranks else f"echo '{said}'; sleep 300"))
    assert lines[0] == said
    assert (end.state, end.exit_code) == (("succeeded", 0) if has_ranks else ("failed", 137))


# Cancelling

# A program that needs a moment for its checkpoint, and calls its end a success.
_SAVES = """trap 'sleep 0.5; echo kept > output/checkpoint; exit 0' TERM
touch ready; while :; do sleep 0.05; done
"""
# One that ignores signals, beside what a rank on another node leaves.
_STUCK = """trap '' TERM
setsid sleep 300 &
echo $! > waiting; echo $$ > ready
while :; do sleep 0.1; done
"""


def cancel_when_ready(head: ThisMachine, paths: JobPaths, grace_s: int) -> None:
    wait_for(lambda: Path(paths.root, "ready").exists())
    assert SlurmLauncher(head).cancel(paths, grace_s) == ()
    assert head.jobs_in_queue() == []
    assert head.processes(SLURM_JOB_ID="1") == []


@pytest.mark.parametrize(
    ("kind", "grace_s", "is_kept"),
    [
        ("checkpoint", 30, True),
        ("checkpoint_estimate", 1, True),
        ("checkpoint_saved", 1, False),
        ("checkpoint", 1, False),
        ("checkpoint", 2, False),
    ],
)
def test_a_cancelled_job_has_time_to_save_a_checkpoint(
    head: ThisMachine, monkeypatch: pytest.MonkeyPatch, kind: str, grace_s: int, is_kept: bool
) -> None:
    """What any program prints is no report. With 2 s, it would take longer than any may."""
    if (kind, grace_s) != ("checkpoint", 1):  # a job that saves none
        monkeypatch.setattr(queue, "STOP_SECONDS", 0)
    monkeypatch.setattr(queue, "_MOST_GRACE_S", 2 if grace_s == 2 else 600)
    said = event(event=kind, step=1, name="step-000001", seconds=20.5)
    forged = '{"event": "checkpoint", "seconds": 4000}' if not is_kept else ""
    stopped = event(event="stopped", step=1, total=9, checkpoint="step-000001")
    # mpirun, which gets the signal as well, may have an exit code of its own.
    quick = f"says={shlex.quote(stopped)}; {_SAVES.replace('exit 0', 'echo $says; exit 255')}"
    saves = quick if grace_s == 30 else _SAVES.replace("sleep 0.5", "sleep 6")
    paths = submit(
        head, f"echo {shlex.quote(said)}; echo {shlex.quote(forged)} ; {saves}", retries=1
    )
    wait_for(lambda: kind in Path(paths.log).read_text())

    cancel_when_ready(head, paths, grace_s)

    assert Path(paths.root, "output", "checkpoint").exists() is is_kept
    (found,) = list_jobs(head)
    assert (found.state, found.attempt) == ("cancelled", 1)
    assert found.exit_code == (143 if is_kept else None)


def test_cancel_kills_what_ignores_signals(head: ThisMachine) -> None:
    paths = submit(head, _STUCK)

    cancel_when_ready(head, paths, 1)

    assert is_gone(int(Path(paths.root, "waiting").read_text()))
    (found,) = list_jobs(head)
    assert (found.state, found.exit_code) == ("cancelled", None)
    # What it took counts for the limits of a resumed run, also if the job comes from its bucket.
    killed = parse_end(Path(paths.end).read_text())
    assert killed
    assert killed.node_s() > 0
    assert killed.nodes == ("node0",)
    end, _, _ = follow(head, submit(head, "echo it can run again"))
    assert end.state == "succeeded"


def test_a_waiting_job_is_cancelled_before_it_starts(head: ThisMachine) -> None:
    other = submit(head, "sleep 60", "squad-11", nodes=3)
    paths = submit(head, "touch ran", "squad-1")

    assert SlurmLauncher(head).cancel(paths, STOP_SECONDS) == ()

    assert head.jobs_in_queue() == [("squad-11", "RUNNING")]
    assert not Path(other.end).exists()
    assert {job.job: job.state for job in list_jobs(head)}["squad-1"] == "cancelled"
    end, lines, _ = follow(head, paths)
    assert (end.state, end.exit_code, lines) == ("cancelled", None, [])
    assert not Path(paths.root, "ran").exists()


def test_a_user_may_cancel_with_slurms_own_command(head: ThisMachine) -> None:
    paths = submit(head, _SAVES)
    wait_for(lambda: Path(paths.root, "ready").exists())
    head.slurm_command("scancel", "1")
    end, _, _ = follow(head, paths)
    assert (end.state, end.exit_code) == ("cancelled", 143)


def test_a_node_out_of_reach_is_named(head: ThisMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm lists the job until that node answers again."""
    script = queue._CANCEL.replace("seq 150", "seq 2")
    monkeypatch.setattr(queue, "_CANCEL", script)
    paths = submit(head, "echo begun; sleep 60", nodes=2)
    read_soon(Path(paths.log))
    (head.slurm / "stuck").touch()
    head.slurm_command("scontrol", "update", "nodename=node1", "state=down")

    assert SlurmLauncher(head).cancel(paths, 0) == ("node1",)
    assert head.jobs_in_queue() == [("squad-1", "COMPLETING")]


# Traces of a job


@pytest.mark.parametrize("ends", ["exit 3", "cancelled", "cancelled while it waits"])
def test_every_node_that_answers_knows_the_end_of_a_job_and_forgets_its_secrets(
    head: ThisMachine, ends: str
) -> None:
    head.connect("node1", "node2")
    if "waits" in ends:
        submit(head, "sleep 60", "other", nodes=3)
    place_files(head, JobPaths("squad-1", str(head.home)), {SECRETS: b"[]", **worker_files()})
    script = (
        f"[ -e {SECRETS} ] || exit 9; touch ready; until [ -e ../go ]; do sleep 0.05; done; {ends}"
    )
    paths = submit(head, script)
    (head.root / "node1").rename(head.root / "away")
    if ends.startswith("cancelled"):
        SlurmLauncher(head).cancel(paths, 0)
    (head.home / "spr-jobs/go").touch()

    end, _, _ = follow(head, paths)

    assert end.exit_code == (3 if ends == "exit 3" else None)
    there = [head.root / node / "spr-jobs/squad-1" for node in ("node0", "node2")]
    wait_for(
        lambda: all((each / "end.json").exists() or (each / "cancelled").exists() for each in there)
    )
    assert not any((each / SECRETS).exists() for each in there)
    assert {each.parent.stat().st_mode & 0o777 for each in there} == {0o700}


# The batch process starts bash, mpirun, and its ranks; run.sh starts the batch process.
_BATCH = "$(ps -o ppid= $(ps -o ppid= $(ps -o ppid= $$)))"


def test_a_killed_batch_process_costs_an_attempt_and_leaves_nothing(head: ThisMachine) -> None:
    # The epilog, which looks for the job's number, would end the rank later.
    rank = "env -u SLURM_JOB_ID setsid sleep 300 & echo $! > rank"
    script = f"{rank}; kill -KILL {_BATCH}; sleep 300"
    paths = submit(head, script, retries=1, again=("echo", "resumed"))

    end, lines, _ = follow(head, paths)

    assert is_gone(int(Path(paths.root, "rank").read_text()))
    assert (end.state, end.attempt, end.nodes) == ("succeeded", 2, ("node0",))
    assert lines[-1] == "resumed"
    why = "its batch process on node0 was killed by signal 9"
    assert any(f"attempt 1 ended: {why}; the job will run again" in line for line in lines)


def test_a_batch_process_with_an_error_of_its_own_is_not_tried_again(head: ThisMachine) -> None:
    end, lines, _ = follow(head, submit(head, "true", retries=1, exports={"A": 1}))
    assert (end.state, end.exit_code, end.attempt) == ("failed", 1, 1)
    assert end.message == "its batch process on node0 ended with exit code 1"
    assert any(line.startswith("TypeError: ") for line in lines)


def keep(head: ThisMachine, number: str, ended: str = "FAILED", name: str = "squad-1") -> None:
    """Do what the keeper does for a job that Slurm ended without a record."""
    for run in head.root.glob(f"node[1-9]/spr-jobs/{name}/run.sh"):
        # Each node has its own home.
        run.write_text(run.read_text().replace(str(head.home), str(run.parents[2])))
    begin = json.loads((head.home / f"spr-jobs/{name}/begin.json").read_text())
    script = render_finish(name, number, ended, begin)[-1]
    head.run(script.replace("/home/ubuntu/", f"{head.home}/"))


def test_a_job_whose_processes_were_all_killed_is_finished_by_the_keeper(
    head: ThisMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after `kill -9 -1` in a rank."""
    monkeypatch.setattr(queue, "END_S", 0.0)
    head.connect("node1")
    submit(head, "sleep 60", "other")
    script = f"touch output/kept {SECRETS}; kill -KILL $(ps -o ppid= {_BATCH}) {_BATCH}; sleep 60"
    paths = submit(head, script, retries=0)
    wait_for(lambda: "squad-1" not in dict(head.jobs_in_queue()))
    with pytest.raises(JobError, match="job squad-1 is lost: it left the queue without an exit"):
        follow(head, paths)

    keep(head, "2")

    end, _, _ = follow(head, paths)
    why = "all its processes on node1 were killed, the batch process among them (Slurm: FAILED)"
    assert (end.state, end.exit_code, end.nodes, end.message) == ("failed", 137, ("node1",), why)
    assert Path(paths.root, "output", "kept").exists(), "results are on the head"
    assert [*head.root.glob(f"node*/spr-jobs/squad-1/{SECRETS}")] == []


def test_an_end_that_its_program_wrote_is_not_believed(head: ThisMachine) -> None:
    forge = """echo '{"state": "succeeded", "exit_code": 0}' > end.json"""
    again = ("bash", "-c", f"{forge}; sleep 2; exit 7")
    paths = submit(head, f"{forge}; kill -KILL $$", retries=1, again=again)
    begin, log = Path(paths.root, "begin.json"), Path(paths.log)
    wait_for(lambda: '"attempt": 2' in read_soon(begin) and Path(paths.end).exists())
    assert [job.state for job in list_jobs(head)] == ["running"]

    end, _, _ = follow(head, paths)

    assert (end.state, end.exit_code, end.attempt) == ("failed", 7, 2)
    assert '"event": "restarted", "attempt": 2, "nodes": ["node0"]' in log.read_text()


def test_a_job_gets_no_variables_of_its_submission(head: ThisMachine) -> None:
    sbatch = (head.bin / "sbatch").read_text()  # it gives a job all that is exported
    head.write_program("sbatch", sbatch.replace("exec", "env >>$HOME/env; exec"))
    submit(head, "true")
    job, shell = (head.home / "env").read_text(), head.run("cd .; env").stdout
    assert {*re.findall(r"^\w+(?==)", job, re.M)} == {*re.findall(r"^\w+(?==)", shell, re.M)}


@pytest.mark.parametrize(("ends", "state"), [("", "succeeded"), (f"kill -KILL {_BATCH}", "failed")])
def test_a_job_that_ends_while_the_head_reboots_waits_for_it(
    head: ThisMachine, ends: str, state: str
) -> None:
    head.connect("node1")
    head.slurm_command("scontrol", "update", "nodename=node0", "state=down")
    script = "echo begun; echo 97 > output/score; until [ -e ../../go ]; do sleep 0.1; done"
    paths = submit(head, f"{script}; printf cut; {ends}")
    wait_for(lambda: "begun" in read_soon(Path(paths.log)))
    away = head.home.rename(head.root / "away")
    (head.root / "node1/go").touch()
    log = head.root / "node1" / paths.relative_root / "log"
    note = event(event="note", text="waiting for node0, which does not answer")
    wait_for(lambda: marked(note, paths.root) in log.read_text().splitlines())
    away.rename(head.home)

    end, lines, _ = follow(head, paths)

    assert (end.state, end.nodes, len(end.starts)) == (state, ("node1",), 1)
    assert Path(paths.root, "output/score").read_text() == "97\n"
    if ends:
        assert end.message == "its batch process on node1 was killed by signal 9"
    else:
        assert Path(paths.log).read_text() == log.read_text()
    assert "failed" not in "\n".join(lines)


def test_a_job_that_is_cancelled_while_its_files_are_sent_never_runs(head: ThisMachine) -> None:
    paths = JobPaths("squad-1", home=str(head.home))
    place_files(head, paths, worker_files())
    assert [job.state for job in list_jobs(head)] == ["submitting"]
    assert SlurmLauncher(head).cancel(paths, 0) == ()

    with pytest.raises(JobError, match="job squad-1 was canceled before it was in the queue"):
        submit(head, "echo begun", variables=("TOKEN=secret",))

    assert head.jobs_in_queue() == []
    assert [job.state for job in list_jobs(head)] == ["cancelled"]
    assert not Path(paths.root, SECRETS).exists()
