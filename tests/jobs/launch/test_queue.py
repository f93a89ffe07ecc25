"""Jobs through the queue: submitted, followed, cancelled, and run again, in this machine's bash."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from infra.errors import HostError, HostKeyError, JobError
from jobs.launch.ending import JobEnd
from jobs.launch.follow import describe_reason
from jobs.launch.history import list_jobs
from jobs.launch.plan import STOP_SECONDS, JobPaths
from jobs.launch.queue import SlurmLauncher
from tests.jobs.context import event
from tests.jobs.launch.this_machine import ThisMachine, is_gone, read_soon, submit


def follow(head: ThisMachine, paths: JobPaths) -> tuple[JobEnd, list[str], list[str]]:
    """Follow a job; returns its end, the lines of its log, and the reasons for its waits."""
    lines, reasons = list[str](), list[str]()
    end = SlurmLauncher(head).follow(paths, lines.append, reasons.append)
    return end, lines, reasons


def test_a_job_is_followed_until_it_ends(head: ThisMachine) -> None:
    paths = submit(head, 'for i in 1 2 3; do echo "$GREETING $i"; sleep 0.2; done; exit 7')

    end, lines, _ = follow(head, paths)

    assert lines == ["it's me 1", "it's me 2", "it's me 3"]
    assert (end.state, end.exit_code, end.nodes, end.attempt) == ("failed", 7, ("node0",), 1)
    assert end.seconds is not None
    assert 0.4 < end.seconds < 10
    assert head.jobs_in_queue() == []
