"""Ranks that lose one of them: killed, frozen, or cut off, on any backend; and ranks that don't."""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from infra.wait import wait_until
from jobs.worker.runtime import heartbeat
from tests.harness.forked import Forked
from tests.jobs.worker.training.test_run import Ended, finish, free_port

TORCHRUN = {"LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}
WARN, LIMIT, LAST_WORDS = 0.8, 2.5, 1.0
PREPARE = f"""
    import os, socket, sys, threading, time
    from worker.runtime import heartbeat, process
    process.ABORT_SECONDS = 0.1
    heartbeat._LAST_WORDS_SECONDS = {LAST_WORDS}
    heartbeat.BEAT_SECONDS, heartbeat.WARN_SECONDS, heartbeat.LIMIT_SECONDS = 0.1, {WARN}, {LIMIT}
    rank, size = int(os.environ["PMI_RANK"]), int(os.environ["PMI_SIZE"])
    socket.gethostname = lambda: f"node{{rank}}"
    all_links = []

    class Link(heartbeat.Link):
        def __init__(self, *args):
            super().__init__(*args)
            all_links.append(self)

    heartbeat.Link = Link

    def meet():  # until this rank can be missed
        while sum(link.rank is not None for link in all_links) < (1 if rank else size - 1):
            time.sleep(0.01)
        print("met", flush=True)
"""
# As oneCCL waits: for ever, in a call that lets other threads run.
STUCK = "threading.Event().wait()"
BARE = """
    from worker.runtime.events import Events
    beat = heartbeat.Heartbeat(process.RankIdentity(rank, size), Events(rank))
    beat.start()
    meet()
    exec(sys.argv[1])
    beat.stop(goodbye=True)
    process.leave(0)
"""
JOB = """
    import torch, torch.distributed as dist
    from worker.runtime.job import RunSettings, run_job

    def train(context):
        meet()
        exec(sys.argv[1])

    process.leave(run_job(train, None, RunSettings("gloo", output=None)))
"""
REDUCE = "while True: dist.all_reduce(torch.ones(1)); time.sleep(0.01)"
PROGRAM = """
    from worker.program.__main__ import main
    threading.Thread(target=meet, daemon=True).start()
    words = ["--folder=work", "--output=output", "--", sys.executable, "-c", sys.argv[1]]
    process.leave(main(words))
"""
HANG = "import time; time.sleep(60)"
KINDS = {"a rank that is stuck": (BARE, STUCK), "a program": (PROGRAM, HANG)}
TORCH = {"gloo": (JOB, REDUCE), "a backend that never returns": (JOB, STUCK)}


class Rank(Forked):
    """A rank as mpirun starts it; ``port`` is the heartbeat's."""

    def __init__(
        self, node: Path, source: str, work: str, rank: int, port: int, size: int = 2
    ) -> None:
        (node / "work").mkdir(exist_ok=True)
        more = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port + 1), "OMP_NUM_THREADS": "1"}
        more |= {"PMI_RANK": str(rank), "PMI_SIZE": str(size), "GLOO_SOCKET_IFNAME": "lo"}
        super().__init__(
            [sys.executable, "-c", textwrap.dedent(PREPARE) + textwrap.dedent(source), work],
            cwd=node,
            env=os.environ | more | {"PYTHONPATH": f"{node}/code"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def wait_until_met(self) -> None:
        assert self.stdout is not None
        lines = []
        for line in self.stdout:
            lines.append(line)
            if line == "met\n":
                return
        raise AssertionError("".join(lines))


@contextmanager
def ranks(
    node: Path, source: str, *works: str, through: dict[int, int] | None = None, port: int = 0
) -> Iterator[list[Rank]]:
    """Ranks that have met; some of them reach rank 0 ``through`` another port."""
    port, through = port or free_port() - 1, through or {}
    with ExitStack() as stack:
        started = []
        for rank, work in enumerate(works):
            process = Rank(node, source, work, rank, through.get(rank, port), len(works))
            stack.enter_context(process)
            stack.callback(process.kill)
            started.append(process)
        for process in started:
            process.wait_until_met()
        yield started


def check_lost(ended: Ended, rank: int, how: str) -> None:
    assert ended.code == 1, ended.output
    (error,) = ended.of("error")
    assert error["message"] == f"lost contact with rank {rank} on node{rank}: {how}"
    assert error["lost_peer"] is True
    assert error["hint"]
    assert "Traceback" not in ended.output


SILENT = f"no answer for {LIMIT:.0f} s"


@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_names_one_that_was_killed(node: Path, kind: str, lost: int) -> None:
    source, work = KINDS[kind]
    with ranks(node, source, work, work, work) as three:
        begin = time.monotonic()
        three.pop(lost).kill()

        for each in three:
            check_lost(finish(each), lost, "its process ended")

        assert time.monotonic() - begin < LIMIT, "a closed connection is noticed at once"


@pytest.mark.parametrize("backend", TORCH)
def test_every_rank_of_a_job_names_one_that_was_killed(node: Path, backend: str) -> None:
    """Gloo fails at once where it was connected to the lost rank, but the heartbeat has the word."""
    source, work = TORCH[backend]
    with ranks(node, source, work, work, work) as three:
        three.pop().kill()
        for each in three:
            check_lost(finish(each), 2, "its process ended")


@pytest.mark.parametrize(("kind", "lost"), [*zip(KINDS, (0, 1), strict=True)])
def test_a_frozen_rank_is_announced_and_then_given_up(node: Path, kind: str, lost: int) -> None:
    source, work = KINDS[kind]
    with ranks(node, source, work, work) as both:
        both[lost].send_signal(signal.SIGSTOP)
        ended = finish(both[1 - lost])

    check_lost(ended, lost, SILENT)
    (note,) = ended.of("note")
    assert note["text"].startswith(f"rank {lost} on node{lost} has not answered for ")


def test_a_rank_that_was_frozen_for_a_while_goes_on(node: Path) -> None:
    work = f"time.sleep({LIMIT})"
    with ranks(node, BARE, work, work) as both:
        both[1].send_signal(signal.SIGSTOP)
        time.sleep((WARN + LIMIT) / 2)
        both[1].send_signal(signal.SIGCONT)
        first, second = map(finish, both)

    assert (first.code, second.code) == (0, 0), first.output + second.output
    notes = [note["text"] for note in first.of("note")]
    assert notes[1:] == ["rank 1 on node1 answers again"]


def test_a_rank_that_rank_0_gave_up_ends_when_it_wakes(node: Path) -> None:
    with ranks(node, BARE, STUCK, STUCK) as both:
        both[1].send_signal(signal.SIGSTOP)
        check_lost(finish(both[0]), 1, SILENT)
        both[1].send_signal(signal.SIGCONT)
        check_lost(finish(both[1]), 0, "its process ended")


class Cable(threading.Thread):
    """Forwards connections to ``port``, until it is cut; then it swallows everything, silently."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.server, self.target = socket.create_server(("127.0.0.1", 0)), port
        self.cut = threading.Event()
        self.ends: list[socket.socket] = []

    def run(self) -> None:
        with suppress(OSError):
            while True:
                near = self.server.accept()[0]
                try:
                    far = socket.create_connection(("127.0.0.1", self.target))
                except OSError:
                    near.close()
                    continue
                self.ends += [near, far]
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self.forward, args=ends, daemon=True).start()

    def forward(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(4096):
                if not self.cut.is_set():
                    target.sendall(data)
            if not self.cut.is_set():
                target.close()


def test_both_sides_of_a_cut_cable_end(node: Path) -> None:
    port = free_port() - 1
    cable = Cable(port)
    cable.start()
    through = {1: cable.server.getsockname()[1]}
    with ranks(node, BARE, STUCK, STUCK, STUCK, through=through, port=port) as three:
        cable.cut.set()
        ended = [finish(each) for each in three]
    for end in (cable.server, *cable.ends):
        end.close()

    for each, lost in zip(ended, (1, 0, 1), strict=True):
        check_lost(each, lost, SILENT)


def wait_for_output(process: subprocess.Popen[str]) -> None:
    """Wait until a process has printed something, without reading it."""
    assert process.stdout is not None
    for _ in range(200):
        if select.select([process.stdout], [], [], 0.1)[0]:
            return
    raise AssertionError("it printed nothing")


def test_a_rank_ends_even_if_nobody_reads_its_output(node: Path) -> None:
    """As on a node that is cut off, where mpirun's proxy can't pass anything on."""
    # Reading "met" could take something out of a pipe that is full already.
    full = "while not os.path.exists('go'): time.sleep(0.01)\n"
    full += "os.set_blocking(1, False)\ntry:\n    while True: os.write(1, b'x' * 4096)\n"
    full += "except BlockingIOError: os.set_blocking(1, True)\n"
    with ranks(node, BARE, full + STUCK, STUCK) as both:
        (node / "go").touch()
        wait_for_output(both[0])
        time.sleep(0.5)  # until the pipe is full
        begin = time.monotonic()
        both[1].kill()
        assert both[0].wait(timeout=30) == 1
    assert time.monotonic() - begin > LAST_WORDS / 2, "it tried to print"


def test_a_run_ends_well_every_time(node: Path) -> None:
    for _ in range(20):
        with ranks(node, BARE, "pass", "pass", "pass") as three:
            ended = [finish(each) for each in three]
        assert [(each.code, each.events) for each in ended] == [(0, [])] * 3, ended


@pytest.mark.parametrize(
    ("source", "early"), [(BARE, 0), (BARE, 1), (PROGRAM, 0)], ids=["rank-0", "rank-1", "program-0"]
)
def test_a_rank_may_end_long_before_the_others(node: Path, source: str, early: int) -> None:
    works = [f"import time; time.sleep({LIMIT + 0.5})"] * 3
    works[early] = "import time; time.sleep(0.5)"
    with ranks(node, source, *works) as three:
        ended = [finish(each) for each in three]

    assert [(each.code, each.events) for each in ended] == [(0, [])] * 3, ended


def test_a_program_may_end_before_the_ranks_have_met(node: Path) -> None:
    port = free_port() - 1
    works = ["pass", "pass", "import time; time.sleep(1)"]
    with ExitStack() as stack:
        three = [Rank(node, PROGRAM, work, rank, port, 3) for rank, work in enumerate(works)]
        for each in three:
            stack.enter_context(each)
            stack.callback(each.kill)
        ended = [finish(each) for each in three]

    said = [(each.code, [event["event"] for event in each.events]) for each in ended]
    assert said == [(0, ["running"]), (0, []), (0, [])], ended


def test_rank_0_stays_after_its_program_to_watch_the_others(node: Path) -> None:
    with ranks(node, PROGRAM, "import time; time.sleep(0.5)", HANG, HANG) as three:
        time.sleep(1)
        three[1].kill()
        check_lost(finish(three[0]), 1, "its process ended")
        check_lost(finish(three[2]), 1, "its process ended")


def test_a_connection_that_is_reset_is_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        link = heartbeat.Link(socket.create_connection(server.getsockname()), 0)
        other = server.accept()[0]
        other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        other.close()
    select.select([link.connection], [], [], 10)
    assert (link.receive(1), link.closed) == ([], True)
    link.connection.close()


def test_a_slow_rank_is_not_lost(node: Path) -> None:
    # Neither a busy thread nor one that keeps all others from running, for many beats.
    busy = f"end = time.monotonic() + {WARN}\nwhile time.monotonic() < end: pass\n"
    held = f"import ctypes; ctypes.PyDLL(None).usleep({int(WARN * 1.5e6)})"
    with ranks(node, BARE, busy + held, busy) as both:
        ended = [finish(each) for each in both]

    assert [each.code for each in ended] == [0, 0], ended
    assert not ended[0].of("error") + ended[1].of("error")


def test_a_program_that_was_asked_to_end_is_not_lost(node: Path) -> None:
    with ranks(node, PROGRAM, HANG, HANG) as both:
        for each in (both[1], both[0]):
            each.send_signal(signal.SIGTERM)
            ended = finish(each)
            assert (ended.code, ended.events) == (128 + signal.SIGTERM, [])


def test_strangers_and_a_port_in_use_do_no_harm(node: Path) -> None:
    port = free_port() - 1
    with socket.create_server(("127.0.0.1", port)):
        alone = Rank(node, BARE.replace("meet()", ""), "time.sleep(0.5)", 0, port)
        ended = finish(alone)
        assert ended.code == 0, ended.output
        (note,) = ended.of("note")
        assert note["text"].startswith("warning: a lost rank will not be noticed: ")
        assert "Address already in use" in note["text"]
    with ranks(node, BARE, "time.sleep(1)", "time.sleep(1)", port=port) as both:
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert stranger.recv(100).startswith(b'{"rank": 0')
        ended_all = [finish(each) for each in both]
    assert [(each.code, each.events) for each in ended_all] == [(0, [])] * 2


def test_the_limits_keep_their_promise() -> None:
    """A minute for a rank that is lost, with the time to print it; a warning well before."""
    last = heartbeat.LIMIT_SECONDS + 2 * heartbeat.BEAT_SECONDS + heartbeat._LAST_WORDS_SECONDS
    assert last <= 60
    assert heartbeat.WARN_SECONDS < heartbeat.LIMIT_SECONDS / 2
    assert heartbeat.VERDICT_SECONDS > 3 * heartbeat.BEAT_SECONDS


def test_in_a_pod_rank_0_answers_at_every_address(node_environ: dict[str, str]) -> None:
    """Its operator may call it localhost; the other pods have its address."""
    port = free_port()
    beat = """
    import time
    from worker.runtime.events import Events
    from worker.runtime.heartbeat import Heartbeat
    from worker.runtime.process import RankIdentity
    Heartbeat(RankIdentity(0, 2), Events()).start()
    time.sleep(60)
    """
    environ = {**node_environ, **TORCHRUN, "MASTER_PORT": str(port)}
    rank = subprocess.Popen([sys.executable, "-c", textwrap.dedent(beat)], env=environ)
    try:
        link = wait_until(
            "a listener", lambda: _connect("127.0.0.2", port - 1), deadline_s=20, every_s=0.05
        )
        with link:
            assert b'"rank": 0' in link.recv(100)
    finally:
        rank.kill()
        rank.wait()


def _connect(address: str, port: int) -> socket.socket | None:
    with suppress(OSError):
        return socket.create_connection((address, port), timeout=5)
    return None
