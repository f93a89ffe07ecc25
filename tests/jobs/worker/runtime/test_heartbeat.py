"""Ranks that lose one of them: killed, frozen, or cut off, on any backend; and ranks that don't."""

from __future__ import annotations

import signal
import socket
import textwrap
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import product
from pathlib import Path

import pytest

from infra.wait import wait_until
from jobs.worker.runtime import heartbeat
from tests.harness.forked import Forked
from tests.jobs.worker.training.test_run import Ended, finish, free_port, rank_environs

TORCHRUN = {"LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}
LIMIT, LAST_WORDS = 3.0, 1.0
SILENCE, NEVER = (1.0, LIMIT), (333.0, 999.0)
"""Seconds until a warning, and until the end; with ``NEVER``, only a closed connection can be the reason."""
PREPARE = f"""
    import os, socket, sys, threading, time
    from worker.runtime import heartbeat, process
    process.ABORT_SECONDS = 0.1
    heartbeat._LAST_WORDS_SECONDS, heartbeat.BEAT_SECONDS = {LAST_WORDS}, 0.1
    heartbeat.WARN_SECONDS, heartbeat.LIMIT_SECONDS = map(float, os.environ["SECONDS"].split())
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
GO = "while not os.path.exists('go'): time.sleep(0.01)"
HANG = "import time; time.sleep(600)"
KINDS = {"a rank that is stuck": (BARE, STUCK), "a program": (PROGRAM, HANG)}
TORCH = {"gloo": (JOB, REDUCE), "a backend that never returns": (JOB, STUCK)}


@contextmanager
def ranks(
    node: Path,
    source: str,
    *works: str,
    port: int = 0,
    seconds: tuple[float, float] = NEVER,
    met: bool = True,
) -> Iterator[list[Forked]]:
    """Ranks that have met."""
    (node / "work").mkdir(exist_ok=True)
    port, code = port or free_port() - 1, textwrap.dedent(PREPARE) + textwrap.dedent(source)
    more = {"PYTHONPATH": f"{node}/code", "SECONDS": "{} {}".format(*seconds)}
    with ExitStack() as stack:
        started = []
        for rank, environ in enumerate(rank_environs(len(works), more=more)):
            environ["MASTER_PORT"] = str(port + 1)
            started.append(stack.enter_context(Forked(["-c", code, works[rank]], node, environ)))
        for process in started if met else ():
            read_until(process, "met\n")
        yield started


def read_until(process: Forked, text: str) -> str:
    """Return the next line that has the text."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return line
    raise AssertionError("".join(lines))


def check_lost(ended: Ended, rank: int, how: str) -> None:
    assert ended.code == 1, ended.output
    (error,) = ended.of("error")
    assert error["message"] == f"lost contact with rank {rank} on node{rank}: {how}"
    assert error["lost_peer"] is True
    assert error["hint"]
    assert "Traceback" not in ended.output


SILENT = f"no answer for {LIMIT:.0f} s"


@pytest.mark.parametrize(
    ("kind", "lost"), [*product(KINDS, (0, 2)), *((backend, 2) for backend in TORCH)]
)
def test_every_rank_names_one_that_was_killed(node: Path, kind: str, lost: int) -> None:
    """Gloo itself fails where it was connected to the lost rank, but the heartbeat has the word."""
    source, work = {**KINDS, **TORCH}[kind]
    with ranks(node, source, work, work, work) as three:
        three.pop(lost).kill()
        for each in three:
            check_lost(finish(each), lost, "its process ended")


@pytest.mark.parametrize(("kind", "lost"), [*zip(KINDS, (0, 1), strict=True)])
def test_a_frozen_rank_is_announced_and_then_given_up(node: Path, kind: str, lost: int) -> None:
    source, work = KINDS[kind]
    with ranks(node, source, work, work, work, seconds=SILENCE) as three:
        three[lost].send_signal(signal.SIGSTOP)
        ended = [finish(three[rank]) for rank in (1 - lost, 2)]

    for each in ended:
        check_lost(each, lost, SILENT)
    (note,) = ended[0].of("note")
    assert note["text"].startswith(f"rank {lost} on node{lost} has not answered for ")


def test_a_rank_that_was_frozen_for_a_while_goes_on(node: Path) -> None:
    with ranks(node, BARE, GO, GO, seconds=(1, 999)) as both:
        both[1].send_signal(signal.SIGSTOP)
        read_until(both[0], "rank 1 on node1 has not answered for ")
        both[1].send_signal(signal.SIGCONT)
        read_until(both[0], "rank 1 on node1 answers again")
        (node / "go").touch()
        assert [finish(each).code for each in both] == [0, 0]


def test_a_rank_that_rank_0_gave_up_ends_when_it_wakes(node: Path) -> None:
    with ranks(node, BARE, STUCK, STUCK, seconds=SILENCE) as both:
        both[1].send_signal(signal.SIGSTOP)
        check_lost(finish(both[0]), 1, SILENT)
        both[1].send_signal(signal.SIGCONT)
        check_lost(finish(both[1]), 0, "its process ended")


def test_a_rank_ends_even_if_nobody_reads_its_output(node: Path) -> None:
    """As on a node that is cut off, where mpirun's proxy can't pass anything on."""
    fill = "os.set_blocking(1, False)\ntry:\n    while True: os.write(1, b'x' * 4096)\n"
    fill += "except BlockingIOError: os.set_blocking(1, True)\nopen('full', 'w')\n"
    with ranks(node, BARE, fill + STUCK, STUCK, met=False) as both:
        read_until(both[1], "met")
        wait_for_file(node / "full")
        begin = time.monotonic()
        both[1].kill()
        assert both[0].wait(timeout=60) == 1
    assert time.monotonic() - begin > LAST_WORDS / 2, "it tried to print"


def wait_for_file(path: Path) -> None:
    wait_until(path.name, lambda: path.exists() or None, deadline_s=60, every_s=0.02)


@pytest.mark.parametrize(
    ("source", "early"), [(BARE, 0), (BARE, 1), (PROGRAM, 0)], ids=["rank-0", "rank-1", "program-0"]
)
def test_a_rank_may_end_long_before_the_others(node: Path, source: str, early: int) -> None:
    works = [f"import os, time; os.chdir('{node}')\n{GO}\ntime.sleep({LIMIT + 1})"] * 3
    works[early] = works[early].rpartition("\n")[0]
    with ranks(node, source, *works, seconds=SILENCE) as three:
        (node / "go").touch()
        ended = [finish(each) for each in three]

    assert [(each.code, each.events) for each in ended] == [(0, [])] * 3, ended


def test_a_program_may_end_before_the_ranks_have_met(node: Path) -> None:
    works = ["pass", "pass", "import time; time.sleep(1)"]
    with ranks(node, PROGRAM, *works, met=False) as three:
        ended = [finish(each) for each in three]

    said = [(each.code, [event["event"] for event in each.events]) for each in ended]
    assert said == [(0, ["running"]), (0, []), (0, [])], ended


def test_rank_0_stays_after_its_program_to_watch_the_others(node: Path) -> None:
    work = f"import os, time; os.chdir('{node}')\n{GO}\nopen('ended', 'w')"
    with ranks(node, PROGRAM, work, HANG, HANG) as three:
        (node / "go").touch()
        wait_for_file(node / "ended")
        time.sleep(0.5)
        three[1].kill()
        check_lost(finish(three[0]), 1, "its process ended")
        check_lost(finish(three[2]), 1, "its process ended")


def test_a_program_that_was_asked_to_end_is_not_lost(node: Path) -> None:
    with ranks(node, PROGRAM, HANG, HANG) as both:
        for each in (both[1], both[0]):
            each.send_signal(signal.SIGTERM)
            ended = finish(each)
            assert (ended.code, ended.events) == (128 + signal.SIGTERM, [])


def test_strangers_and_a_port_in_use_do_no_harm(node: Path) -> None:
    port, nothing = free_port() - 1, BARE.replace("meet()", "")
    with (
        socket.create_server(("127.0.0.1", port)),
        ranks(node, nothing, GO, GO, port=port, met=False) as (alone, _),
    ):
        said = read_until(alone, "Address already in use")
        assert '"warning: a lost rank will not be noticed: ' in said
        (node / "go").touch()
        assert finish(alone).code == 0
    (node / "go").unlink()
    with ranks(node, BARE, GO, GO, port=port) as both:
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert stranger.recv(100).startswith(b'{"rank": 0')
        (node / "go").touch()
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
    with Forked(["-c", textwrap.dedent(beat)], env=environ):
        for address in ("127.0.0.2", "::1") if socket.has_dualstack_ipv6() else ("127.0.0.2",):
            link = wait_until(
                "a listener", partial(_connect, address, port - 1), deadline_s=60, every_s=0.05
            )
            with link:
                assert b'"rank": 0' in link.recv(100)


def _connect(address: str, port: int) -> socket.socket | None:
    with suppress(OSError):
        return socket.create_connection((address, port), timeout=5)
    return None
