"""The connection to the head: the first complete snapshot, and what happens when it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest

from cluster.nodes import Cluster
from infra.errors import DeadlineError, HostError, HostKeyError, UsageError
from infra.wait import wait_until
from jobs.top import collect
from jobs.top.collect import Collector, Watched, send_relay
from jobs.top.queue_and_logs import CONNECTING
from jobs.top.snapshot import Snapshot
from provision.host import Stream
from tests.cluster.test_overview import WHOLE, look
from tests.fakes import FakeHost, FakeStream
from tests.infra.plan_inputs import NOW
from tests.jobs.context import whole_cluster
from tests.jobs.top.samples import make_line, make_node

GOOD = make_line([make_node(0)])
WAITING = make_line([make_node(0), {"name": "node1", "error": CONNECTING}])
NO_QUEUE = make_line([make_node(0)], queue_error=CONNECTING)


@dataclass
class OpenStream(FakeStream):
    """A connection that stays open after some lines."""

    closed: threading.Event = field(default_factory=threading.Event)

    def __iter__(self) -> Iterator[str]:
        yield from self.lines
        self.closed.wait(60)

    def close(self) -> None:
        self.closed.set()


@dataclass
class Head(FakeHost):
    """Opens one stream after the other; then none."""

    streams: list[Stream | Exception] = field(default_factory=list)

    def open_stream(self, command: str) -> Stream:  # type: ignore[override]
        found = self.streams.pop(0) if self.streams else HostError(self.name, "no more streams")
        if isinstance(found, Exception):
            raise found
        return found


Begin = Callable[..., Collector]


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    """Starts a collector whose head opens these streams."""
    monkeypatch.setattr(collect, "_RETRY_S", 0.1)
    begun: list[Collector] = []

    def begin(
        *streams: Stream | Exception, clusters: list[Cluster | Exception] | None = None
    ) -> Collector:
        head, seen = Head("node0", [], streams=list(streams)), list(clusters or [])

        def look_up() -> Watched:
            cluster = seen.pop(0) if len(seen) > 1 else (seen or [whole_cluster()])[0]
            if isinstance(cluster, Exception):
                raise cluster
            return Watched(cluster, look(WHOLE), lambda _: head)

        collector = Collector(look_up, now=lambda: NOW)
        begun.append(collector)
        collector.start()
        return collector

    yield begin
    for collector in begun:
        collector.stop()


def wait_for(collector: Collector, problem: str) -> Snapshot | None:
    """Wait until something is wrong with the connection; return the newest snapshot."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        snapshot, found = collector.latest()
        if problem == found or (problem and problem in found):
            return snapshot
        time.sleep(0.005)
    raise AssertionError(collector.latest())


def test_the_first_snapshot_has_every_node_and_what_ec2_knows(begin: Begin) -> None:
    stream = OpenStream([WAITING, NO_QUEUE, GOOD])

    found = begin(stream).first()

    assert ([node.name for node in found.nodes], found.queue_error) == (["node0"], "")
    assert (found.cluster, found.ttl_left_s) == ("bert", 8 * 3600)
    assert found.usd == pytest.approx(look(WHOLE).cost(NOW).usd)  # type: ignore[union-attr]
    programs, *beats = stream.sent
    assert programs == send_relay(("node0", "node1", "node2"), 1.0).stdin
    assert beats == ["\n"] * 3


def test_a_node_that_does_not_answer_is_not_waited_for_forever(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collect, "_FIRST_S", -0.9)
    assert len(begin(OpenStream([WAITING])).first().nodes) == 2

    with pytest.raises(DeadlineError, match="the head sends no figures: it does not answer"):
        begin(OpenStream([])).first()


@pytest.mark.parametrize(
    ("first", "problem"),
    [
        (FakeStream([GOOD]), "the connection to the head ended; connecting again"),
        (FakeStream(["python3: not found"]), "the head says: python3: not found; connecting again"),
        (OpenStream([GOOD.replace("nodes", "n")]), "the head's figures: nodes: Field required"),
    ],
)
def test_it_says_why_there_is_nothing_new(begin: Begin, first: Stream, problem: str) -> None:
    collector = begin(first, HostError("node0", "no SSH at 10.0.0.4: refused"), OpenStream([GOOD]))

    wait_for(collector, problem)
    first.close()
    wait_for(collector, "[node0] no SSH at 10.0.0.4: refused; connecting again")
    assert wait_for(collector, "")


@pytest.mark.parametrize("error", [UsageError("no cluster"), HostKeyError("node0", "another key")])
def test_it_gives_up_when_the_cluster_or_its_head_is_another(
    begin: Begin, error: Exception
) -> None:
    collector = begin(FakeStream([GOOD]), clusters=[whole_cluster(), error])

    with pytest.raises(type(error)):
        wait_for(collector, "never")
    with pytest.raises(type(error)):
        collector.first()


def test_a_cluster_that_grew_is_watched_as_a_whole(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collect, "_LOOK_UP_S", 0.0)
    whole = whole_cluster()
    smaller = replace(whole, nodes=whole.nodes[:2])
    streams = [OpenStream([GOOD, GOOD]), OpenStream([GOOD])]
    collector = begin(*streams, clusters=[smaller, whole])

    assert streams[0].closed.wait(60)
    wait_for(collector, "")
    begun, grown = (
        streams[0].sent,
        wait_until("stream", lambda: streams[1].sent or None, deadline_s=60),
    )
    assert ['"node2"' in sent[0] for sent in (begun, grown)] == [False, True]


def test_a_silent_head_is_said_to_be_silent(begin: Begin) -> None:
    collector = begin(OpenStream([GOOD]))
    collector.first()

    collector._heard = time.monotonic() - 60
    snapshot, problem = collector.latest()

    assert snapshot
    assert problem == "no answer from the head for 60 s"
