"""Decisions about the loss of ranks and nodes: what hangs, what is lost, who has what."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jobs.worker.runtime.cores import CoreShare
from jobs.worker.runtime.pinning import VARIABLE, RankPlacement
from jobs.worker.spec import JobSpec
from jobs.worker.supervisor import nodes
from jobs.worker.supervisor.__main__ import Supervisor
from jobs.worker.supervisor.attempt import (
    choose_copy_limit,
    describe,
    describe_killed,
    describe_lost_nodes,
    name_nodes,
)
from jobs.worker.supervisor.commands import CANCELLED, LOW_PRIORITY, REQUEUED, Running, SlurmJob
from jobs.worker.supervisor.head import SSH
from jobs.worker.supervisor.launch import fit_pinning, render_pinning
from jobs.worker.supervisor.log_reader import LONGEST
from jobs.worker.supervisor.nodes import (
    NodeState,
    newest_copy,
    order_nodes,
    parse_state,
)
from jobs.worker.supervisor.watch import (
    IdleWatch,
    LogWatch,
    StallDetector,
    measure_ranks,
)
from tests.jobs.places.this_machine import wait_for


def training(*steps: float) -> StallDetector:
    """A run that began to train at 0 and took steps at these times."""
    found = StallDetector()
    found.see("phase", "load", -50)
    found.see("phase", "train", 0)
    for now in steps:
        found.see("step", "", now)
    return found


@pytest.mark.parametrize(
    ("steps", "now", "expected"),
    [
        ((), 10_000, 0),  # it may compile the model, or wait for a download
        ((1, 2), 182, 0),
        ((1, 2), 183, 181),
        ((60, 70), 669, 0),  # ten times the longest step
        ((60, 70), 671, 601),
    ],
)
def test_a_run_hangs_after_many_times_its_longest_step(
    steps: tuple[float, ...], now: float, expected: float
) -> None:
    assert training(*steps).stalled(now) == expected


def test_only_the_phase_with_steps_can_hang() -> None:
    run = training(1, 2)
    run.see("checkpoint", "step-000002", 170)
    assert run.stalled(349) == 0
    assert run.stalled(351) == 181
    assert run.stalled(351, least_s=182) == 0
    # An evaluation takes as long as its data need, and is not the longest step.
    run.see("evaluating", "", 352)
    assert run.stalled(9000) == 0
    run.see("evaluation", "", 652)
    assert run.stalled(833) == 181, "before its next step"
    run.see("step", "", 653)
    run.see("evaluating", "", 654)
    assert run.stalled(3654) == 0
    assert run.stalled(3655) == 3001
    run.see("phase", "train", 4000)
    assert run.stalled(9000) == 0
    run.see("phase", "save", 9000)
    assert run.stalled(10_000) == 0


def test_the_log_tells_of_errors_hosts_and_steps(tmp_path: Path) -> None:
    log = tmp_path / "log"
    figures = ("epoch", "loss", "samples_per_second", "tokens_per_second", "eta_seconds")
    error = {"event": "error", "message": "m", "lost_peer": True}
    events = [
        {"event": "start", "hosts": ["a", "b"], "world_size": 2, "backend": "", "dtype": ""},
        {"event": "phase", "name": "train"},
        {"event": "step", "step": 1, "total": 9, **dict.fromkeys(figures, 1), "shares": {}},
        error,
    ]
    log.write_text("text\n" + "".join(f"@spr {json.dumps(event)}\n" for event in events))
    watch = LogWatch(log)
    watch.poll()
    first = watch.failed_at
    assert first is not None
    with log.open("a") as file:
        file.write(f"@spr {json.dumps(error)}\n")
    watch.poll()
    assert watch.failed_at == first, "the grace begins with the first error"
    assert (watch.start["hosts"], watch.errors) == (["a", "b"], [error] * 2)
    assert watch.steps.stalled(1e9) > 0


def test_a_line_without_an_end_is_not_read_again(tmp_path: Path) -> None:
    """A progress bar may rewrite one line for days; an event may begin it, or follow on it."""
    log = tmp_path / "log"
    log.touch()
    watch = LogWatch(log)
    error = f"@spr {json.dumps({'event': 'error', 'message': 'm'})}"
    for text in ("\r 50%" * 200_000, error, "\n"):
        with log.open("a") as file:
            file.write(text)
        watch.poll()
        assert len(watch.partial) <= LONGEST
    assert [event["message"] for event in watch.errors] == ["m"]


NODES = ("node0", "node1", "node2")


@pytest.mark.parametrize(
    ("code", "fate", "waits"),
    [(0, "", False), (143, "", True), (1, REQUEUED, False), (143, CANCELLED, False)],
)
def test_copies_do_not_delay_the_end_until_slurm_kills(
    code: int, fate: str, *, waits: bool
) -> None:
    # Slurm gives 30 s, in which it also has to be asked and files have to be written.
    assert (choose_copy_limit(code, fate) > 10) is waits
    assert (choose_copy_limit(code, fate, 275.0) == 275) is waits


def test_an_error_has_the_names_of_nodes_instead_of_their_host_names() -> None:
    error = {"rank": 3, "host": "ip-1", "message": "lost contact with rank 0 on ip-10: its process"}
    found = name_nodes(error, NODES, {"hosts": ["ip-10", "ip-1", "ip-3"]}, 2)
    assert describe(found) == "rank 3 on node1: lost contact with rank 0 on node0: its process"
    # Before the ranks have met.
    assert name_nodes(error, NODES, {}, 2) == {**error, "host": "node1"}
    assert describe_lost_nodes(("node1",), NODES, 2)["rank"] == 2


def test_a_killed_rank_and_a_lost_node_are_known_from_mpirun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    log.write_text(
        "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n"
        "=   RANK 1 PID 654 RUNNING AT node1\n=   KILLED BY SIGNAL: 9 (Killed)\n"
        "=   RANK 2 PID 655 RUNNING AT node2\n=   KILLED BY SIGNAL: 15 (Terminated)\n"
        "[mpiexec@ip-4] Error: Downstream from host node1 exited abnormally\n"
        "[mpiexec@ip-4] wait_proxies_to_terminate: downstream from host node1 exited with status 255\n"
    )
    watch = LogWatch(log)
    watch.poll()
    asked = []

    def explain(*known: Any) -> str:
        asked.append(known)
        return ": why"

    monkeypatch.setattr("jobs.worker.supervisor.attempt.explain_kill", explain)
    for hosts in (["node0", "node1"], ["node1", "node2"]):
        found = describe(describe_killed(watch.killed, hosts))
        assert found == "rank 1 on node1: killed by signal 9 (Killed): why"
    ssh = (*SSH, "node1")
    assert asked == [(9, 654, ssh), (9, 654, ())]
    assert describe_killed({}, ["node0"]) == {}
    describe_killed({**watch.killed, "node": "-oProxyCommand=id"}, ["node0", "node1"])
    assert asked[-1] == (9, None, ())
    assert watch.lost == ("node1",)


def test_what_a_node_says_about_itself() -> None:
    text = "files\nstep-000015\nstep-000030\nstep-000045.copy\nstep-000045.partial\ncpus 0 1 4\n"
    assert parse_state(text) == NodeState((0, 1, 4), True, 30)
    assert parse_state("cpus 3\n") == NodeState((3,), False, -1)


def test_the_newest_checkpoint_comes_from_another_node_and_goes_to_the_head_or_from_it() -> None:
    for steps, expected in (
        ({"node0": 15, "node1": 30, "node2": 15}, "node1"),
        ({"node0": 30, "node1": 30}, ""),
        ({"node1": 15}, "node1"),  # nothing is known of this node
        ({"node0": -1, "node1": -1}, ""),
    ):
        states = {name: NodeState(newest=step) for name, step in steps.items()}
        assert newest_copy(states, "node0") == expected
    assert order_nodes(NODES, "node0", "node0") == ["node1", "node2"]
    assert order_nodes(NODES, "node2", "node0") == ["node0", "node1"]
    assert order_nodes(NODES[1:], "node1", "node0") == ["node2"], "the head does not answer"


PLANNED = (CoreShare((0, 1), (2,), 0), CoreShare((4, 5), (6,), 0))


def test_a_silent_node_with_the_only_checkpoint_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states = {name: NodeState((0,), has_files=True) for name in ("node0", "node1")}
    found = iter([states, states | {"node2": NodeState((0,), has_files=True, newest=7)}])
    fetched = iter([False, True])
    monkeypatch.setattr(nodes, "_PAUSE_S", 0)
    monkeypatch.setattr(nodes, "ask_nodes", lambda *_: next(found))
    monkeypatch.setattr(nodes, "fetch_checkpoint", lambda *_: next(fetched))
    launch: Any = SimpleNamespace(
        folder="/job",
        head="node0",
        pinning=dict.fromkeys(NODES, ()),
        resumes=True,
        prepared=lambda **_: None,
        spec=JobSpec(),
    )

    nodes.prepare(launch, SlurmJob("1", NODES[:2], 2), tuple)

    assert (*found, *fetched) == ()


def test_a_pinning_moves_to_the_cpus_of_a_replaced_node_if_there_are_enough() -> None:
    for cpus in (range(8), range(2)):  # as planned; too few, as a rank will say
        assert fit_pinning(PLANNED, cpus) == PLANNED
        assert fit_pinning((), cpus) == ()
    moved = fit_pinning(PLANNED, range(10, 16))
    env = render_pinning(moved, 2, 2, ccl=True)

    assert env["I_MPI_PIN_DOMAIN"] == f"[{hex(0b11 << 10)},{hex(0b11 << 13)}]"
    assert env["CCL_WORKER_AFFINITY"] == "12,15"
    places = [RankPlacement(**place) for place in json.loads(env[VARIABLE])]
    found = [(place.cpus, place.workers, place.memory) for place in places]
    assert found == [("10-11", "12", None), ("13-14", "15", None)]


def test_an_idle_job_is_mentioned_after_ten_minutes_and_then_rarely() -> None:
    used, said = [0.0], list[float]()
    idle = IdleWatch(lambda: used[0])
    for minute in range(1, 120):
        size = 7 if minute < 5 else 8  # it prints at minute 5
        used[0] += 30 if minute == 50 else 0.1  # and computes at minute 50
        # The clock is that of a machine that has run for hours.
        if silent := idle.find(size, 20_000 + minute * 60.0):
            said.append(minute)
            assert silent % 600 == 0
    assert said == [15, 25, 45, 60, 70, 90]


def test_a_neighbors_ranks_do_not_count(tmp_path: Path) -> None:
    spin = "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done; read x"
    env = {"SPR_JOB_FOLDER": f"{tmp_path}-2", "PMI_RANK": "0"}
    with subprocess.Popen(["sh", "-c", spin], env=env, stdin=subprocess.PIPE) as rank:
        wait_for(lambda: measure_ranks(f"SPR_JOB_FOLDER={tmp_path}-2".encode()) > 0.02)
        assert measure_ranks(f"SPR_JOB_FOLDER={tmp_path}".encode()) == 0
        rank.kill()


@pytest.mark.parametrize("group", [Path("/proc/self/autogroup"), Path("/proc/self/no-such-file")])
def test_low_priority_within_a_session_and_among_sessions_that_have_one(group: Path) -> None:
    words = LOW_PRIORITY.replace("/proc/self/autogroup", str(group))
    argv = ["sh", "-ec", f"({words} sh -c 'nice; cat {group} 2>/dev/null || :')"]
    done = subprocess.run(argv, capture_output=True, text=True, start_new_session=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("19\n")
    assert done.stdout.endswith("nice 19\n") is group.exists()


@pytest.mark.parametrize(
    ("argv", "limit_s", "printed", "why"),
    [
        (["head", "-c", "99999", "/dev/zero"], 60, "\0" * 99999, ""),  # more than a pipe takes
        (["sh", "-c", "echo a; echo b >&2; echo c >&2; exit 3"], 60, "a", "c"),
        (["sh", "-c", "exit 3"], 60, "", "exit code 3"),
        (["sleep", "60"], 0, "", "it took longer than 0 min"),
        (["no-such-program"], 60, "", "env: 'no-such-program': No such file or directory"),
    ],
    ids=["long", "says why", "silent", "slow", "missing"],
)
def test_a_command_beside_the_loop(argv: list[str], limit_s: float, printed: str, why: str) -> None:
    found = Running(argv, limit_s).wait()
    assert (found.printed, found.why.translate({0x2018: "'", 0x2019: "'"})) == (printed, why)


@pytest.mark.parametrize(
    ("state", "fate", "first"),
    [
        ("succeeded", REQUEUED, "send"),
        ("failed", "", "send"),
        ("failed", REQUEUED, "write"),
        ("cancelled", "", "write"),
    ],
)
def test_an_outcome_waits_for_the_results_unless_slurm_ends_the_supervisor_soon(
    monkeypatch: pytest.MonkeyPatch, state: str, fate: str, first: str
) -> None:
    did = list[str]()
    main = "jobs.worker.supervisor.__main__"
    monkeypatch.setattr(f"{main}.conclude", lambda *_, **__: {"state": state})
    monkeypatch.setattr(Supervisor, "_close", lambda *_: did.append("close"))
    job = SimpleNamespace(fate=lambda: fate, keep_from_requeueing=lambda: None)
    head: Any = SimpleNamespace(exists=lambda _: False, send_results=lambda: did.append("send"))
    head.write = lambda *_: did.append("write")
    head.wait = lambda *_, **__: None
    watcher: Any = SimpleNamespace(job=job, stop=None, log=SimpleNamespace(partial=b""))
    assert Supervisor(watcher, head)._finish(1) == 1
    assert (did[0], did[-1]) == (first, "close")
