"""A job that the cluster's deadline ends: it saves a checkpoint before, and is not started again."""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path
from typing import Any

import pytest

from jobs.worker.spec import Ending
from jobs.worker.supervisor.deadline import SAVE_S, Deadline
from tests.jobs.context import event
from tests.jobs.places.this_machine import ThisMachine, submit, wait_for
from tests.jobs.worker.supervisor.test_notices import TASK_SAVES, follow

_PAYS = "--budget $0.4 pays for no more than 1.5 min and a checkpoint"
_LEAVE_S = 2  # how long ranks have when a node leaves, on this machine


@pytest.mark.parametrize(
    ("text", "limit", "expected"),
    [
        ("1000 9000 1800\n", 0.0, 1000),
        ("1000 9000 1800\n", 60.0, 7200),
        ("1000 2800 1800\n", 60.0, 1000),
        ("", 60.0, 5),
        ("1000\n", 0.0, 5),
    ],
)
def test_the_deadline_of_a_job(text: str, limit: float, expected: float) -> None:
    deadline = Deadline(Ending(max_time_s=limit), expires=5.0)
    deadline.take(text)
    assert deadline.expires == expected


@pytest.mark.parametrize(
    ("seconds", "checkpoint_s", "expected"),
    [(60, 0, 20), (800, 0, 100), (9999, 0, 300), (800, 50, 150), (800, 1, 100)],
)
def test_how_long_before_the_deadline_a_job_stops(
    seconds: float, checkpoint_s: float, expected: float
) -> None:
    for late in (-2, 2):
        began = time.time() - seconds + expected - late
        deadline = Deadline(starts=[(began, 1)], expires=began + seconds)
        assert bool(deadline.find_end(checkpoint_s)) is (late > 0)


def expire_in(head: ThisMachine, seconds: float) -> str:
    """Let the node's guard say when it powers the node off; return that time."""
    at = int(time.time() + seconds)
    head.write_program("sudo", f"#!/bin/sh\necho {at} {at + 1800} 1800\n")
    return time.strftime("%H:%M UTC", time.gmtime(at))


def test_a_job_saves_a_checkpoint_before_the_deadline_and_is_not_requeued(
    head: ThisMachine,
) -> None:
    at = expire_in(head, 24)
    kept = event(event="checkpoint", step=7, name="step-000007", seconds=0.1)
    # A slow checkpoint has until the deadline.
    slow = TASK_SAVES.replace("echo kept", f"sleep {4 * _LEAVE_S}; echo kept")
    script = f"echo {shlex.quote(kept)}; {slow}"
    paths = submit(head, script, retries=1, again=("echo", "resumed"), task="squad")
    wait_for(Path(paths.root, "ready").exists)

    end, log = follow(head, paths)

    message = f"the cluster's time to live is over at {at}"
    assert (end.state, end.attempt) == ("failed", 1)
    assert end.message == f"{message}; checkpoint step-000007 is kept"
    assert Path(paths.root, "output", "checkpoint").read_text() == "kept\n"
    assert f"{message}; saving a checkpoint and stopping" in log
    assert "resumed" not in log
    assert json.loads(Path(paths.end).read_text())["deadline"] is True


def test_a_job_that_has_no_time_left_does_not_start(head: ThisMachine) -> None:
    at = expire_in(head, 10)
    paths = submit(head, "touch ready", retries=1)

    end, log = follow(head, paths)

    message = f"the cluster's time to live is over at {at}"
    assert (end.state, end.message) == ("failed", message)
    assert f"{message}; the job does not start" in log
    assert not Path(paths.root, "ready").exists()


def test_a_job_has_three_times_as_long_as_its_last_checkpoint_took() -> None:
    deadline = Deadline(Ending(max_time_s=90.0), starts=[(time.time() - 91, 1)])
    assert deadline.find_end(1.0)["until"] == pytest.approx(time.time() + 119, abs=2)
    assert deadline.find_end(100.0)["until"] == pytest.approx(time.time() + 299, abs=2)


@pytest.mark.parametrize(
    ("known", "resumes", "message"),
    [
        ((90.0, 0.4, 9e9), False, "it took longer than --max-time, 1.5 min"),
        ((90.0, 0.0, 0.0), True, "it took longer than what was left of --max-time, 1.5 min"),
        ((900.0, 0.4, 210.0), False, _PAYS),
        # On fewer nodes than at first, or after `extend`, it would pay for more.
        ((90.0, 0.4, 9e9, True), False, _PAYS),
    ],
)
def test_a_job_at_its_limit_says_which(known: tuple[Any, ...], resumes: bool, message: str) -> None:
    """With both, the limit is the shorter one, computed at the submission."""
    names = ("max_time_s", "budget", "paid_node_s", "by_budget")
    ending = Ending(**dict(zip(names, known, strict=False)))
    assert not Deadline(ending, starts=[(time.time() - 60, 1)]).find_end()
    ended = Deadline(ending, starts=[(time.time() - 91, 1)], resumes=resumes).find_end()
    assert ended["message"] == message


@pytest.mark.parametrize(("waited", "hours"), [(0, 4), (1, 3.25), (2, 2.5), (4, 1), (9, 1)])
def test_a_job_that_waited_in_the_queue_does_not_keep_all_nodes_for_more_than_its_budget(
    waited: float, hours: float
) -> None:
    """The budget pays for four hours of its one node, whose time to live ends after four hours."""
    submitted = time.time()
    deadline = paid(4 * 3600.0, 4, [(submitted + waited * 3600, 1)])
    assert deadline.longest_s() == 4 * 3600 - SAVE_S
    over = int(submitted) + 4 * 3600
    deadline.take(f"{over} {over + 9 * 3600} 0")
    assert deadline.longest_s() == pytest.approx(3600 * hours - SAVE_S, abs=2)
    assert deadline.longest_s(100.0) == pytest.approx(3600 * hours - 300, abs=2)


def paid(node_s: float, nodes: int, starts: list[tuple[float, int]], **more: Any) -> Deadline:
    """The deadline of a job whose budget pays for so many seconds of one node."""
    share = more.pop("node_share", 1.0)
    ending = Ending(max_time_s=9e9, budget=4.0, paid_node_s=node_s, node_share=share)
    return Deadline(ending, nodes, starts, **more)


@pytest.mark.parametrize(
    ("share", "over", "hours"), [(1.0, 9, 3), (0.5, 9, 7), (0.5, 4, 4.375), (1.0, 0.5, 1.25)]
)
def test_a_budget_counts_the_nodes_of_each_attempt(share: float, over: float, hours: float) -> None:
    """It pays for four hours of a node; the first attempt was on two, for an hour."""
    starts = [(0.0, 2), (3600.0, 1)]
    deadline = paid(4 * 3600.0, 4, starts, over=over * 3600, node_share=share)
    assert deadline.longest_s() == pytest.approx(3600 * hours - SAVE_S)


@pytest.mark.parametrize(("node_s", "measured_s", "longest"), [(700, 0, 580), (1000, 275, 175)])
def test_saving_a_checkpoint_takes_no_more_than_the_budget(
    node_s: float, measured_s: float, longest: float
) -> None:
    """An estimate of how long it may take does not shorten the job."""
    first = time.time() - longest - 1
    deadline = paid(node_s, 1, [(first, 1)])
    assert deadline.longest_s(measured_s) == longest
    assert deadline.find_end(275.0, measured_s)["until"] == first + node_s


def test_the_limits_know_the_first_attempt_and_its_checkpoint(head: ThisMachine) -> None:
    again = ("bash", "-c", "touch again; sleep 60")
    saved = event(event="checkpoint", step=7, name="step-000007", seconds=100.0)
    script = f"echo {shlex.quote(saved)}; sleep 1; kill -KILL $$"
    limits: dict[str, Any] = {"max_time_s": 1000.0, "budget": 1.0, "paid_node_s": 304.0}
    paths = submit(head, script, retries=3, again=again, **limits)
    begin = time.monotonic()

    end, _ = follow(head, paths)

    assert time.monotonic() - begin < 45  # its second attempt would take 60 s
    assert (end.state, end.attempt) == ("failed", 2)
    assert end.message == "--budget $1 pays for no more than 0.1 min and a checkpoint"
