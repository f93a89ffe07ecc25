"""Collect a cluster's metrics over one SSH connection to its head.

The nodes' programs are sent over standard input; nothing is installed. The viewer sends a beat for every
line: without beats, the relay and the samplers exit.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime

from botocore.exceptions import BotoCoreError, ClientError

from cluster.local_files import utc_now
from cluster.nodes import Cluster, HostOpener
from cluster.overview import Overview
from infra.errors import DeadlineError, HostKeyError, SprError, UsageError
from jobs.top import relay
from jobs.top.snapshot import Snapshot, parse_snapshot
from provision.host import Stream
from provision.on_node import sampler
from provision.run_on_nodes import Program, send

_SQUEUE = ("squeue", "-h", "-o", "%A|%j|%T|%M|%D|%C|%N|%r")
_JOBS = "~/spr-jobs"
_RETRY_S = 5.0
_FIRST_S = 25.0
"""Time for the first complete snapshot; detecting a lost node takes ten seconds."""
_LOOK_UP_S = 300.0
_UNKNOWN = (SprError, ClientError, BotoCoreError)


def send_relay(
    nodes: Sequence[str], interval_s: float, queue: Sequence[str] = _SQUEUE, jobs: str = _JOBS
) -> Program:
    """Return the relay program, with its plan and the samplers that it starts. The head comes first."""
    question = {"interval_s": interval_s, "jobs": jobs}
    samplers = asdict(send(sampler, lines=[json.dumps(question)]))
    plan = {**question, **samplers, "nodes": nodes, "queue": queue}
    return send(relay, lines=[json.dumps(plan)])


@dataclass(frozen=True)
class Watched:
    """A cluster as EC2 describes it, and a way to connect to its nodes."""

    cluster: Cluster
    overview: Overview
    open_host: HostOpener

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(node.name for node in self.cluster.nodes)

    def open_stream(self, interval_s: float) -> Stream:
        """Start the relay on the head. Raises :class:`HostError`."""
        program = send_relay(self.names, interval_s)
        stream = self.open_host(self.cluster.head).open_stream(program.command)
        stream.send(program.stdin)
        return stream

    def complete(self, snapshot: Snapshot, now: datetime) -> Snapshot:
        """Add the values from EC2: cost and remaining time."""
        cost, expires = self.overview.cost(now), self.overview.expires
        latest = self.overview.latest
        return replace(
            snapshot,
            cluster=self.overview.name,
            usd=cost.usd if cost else None,
            usd_is_most=bool(cost and cost.is_most),
            ttl_left_s=(expires - now).total_seconds() if expires else None,
            grace_left_s=(latest - now).total_seconds() if latest else None,
        )


@dataclass
class Collector:
    """Keeps the newest snapshot of a cluster, received by a separate thread.

    ``look_up`` reads the cluster from EC2: at the start, every few minutes, and before each connection.
    """

    look_up: Callable[[], Watched]
    interval_s: float = 1.0
    now: Callable[[], datetime] = utc_now
    _snapshot: Snapshot | None = None
    _problem: str = ""
    _failure: SprError | None = None
    _heard: float = 0.0
    _stream: Stream | None = None
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _ended: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Connect. Raises :class:`UsageError` without a cluster, :class:`HostError` without an answer."""
        watched = self._connect()
        threading.Thread(target=self._work, args=(watched,), daemon=True).start()

    def stop(self) -> None:
        self._ended.set()
        if self._stream is not None:
            self._stream.close()

    def latest(self) -> tuple[Snapshot | None, str]:
        """Return the newest snapshot, and the connection's problem ("" if none).

        Raises :class:`UsageError` if the cluster is gone, :class:`HostKeyError` for a changed host key.
        """
        if self._failure:
            raise self._failure
        silent = time.monotonic() - self._heard
        if not self._problem and silent > 3 * self.interval_s + 3:
            return self._snapshot, f"no answer from the head for {silent:.0f} s"
        return self._snapshot, self._problem

    def first(self) -> Snapshot:
        """Wait a limited time for every node's answer. Raises :class:`DeadlineError` without any."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure or (self._snapshot and self._snapshot.is_complete),
                _FIRST_S + self.interval_s,
            )
        snapshot, problem = self.latest()
        if snapshot is None:
            raise DeadlineError(f"the head sends no figures: {problem or 'it does not answer'}")
        return snapshot

    def _connect(self) -> Watched:
        watched = self.look_up()
        self._stream = watched.open_stream(self.interval_s)
        self._heard = time.monotonic()
        return watched

    def _work(self, watched: Watched) -> None:
        """Receive, and reconnect when the connection ends, until :meth:`stop`."""
        while not self._failure:
            try:
                if self._stream is not None:
                    self._receive(watched)
                if self._ended.wait(_RETRY_S):
                    return
                self._stream = None
                watched = self._connect()
            except (UsageError, HostKeyError) as error:
                self._failure = error
            except _UNKNOWN as error:
                self._problem = f"{getattr(error, 'message', error)}; connecting again"
            with self._changed:
                self._changed.notify_all()

    def _receive(self, watched: Watched) -> None:
        """Receive snapshots until the connection ends or the cluster's nodes change."""
        assert self._stream is not None
        looked_up, words = time.monotonic(), "the connection to the head ended"
        for line in self._stream:
            if self._ended.is_set():
                break
            self._heard = time.monotonic()
            if not line.startswith("{"):
                words = f"the head says: {line[:200]}"
                continue
            self._stream.send("\n")
            self._take(line, watched)
            if self._heard - looked_up > _LOOK_UP_S:
                looked_up, before = self._heard, watched.names
                with suppress(*_UNKNOWN):
                    watched = self.look_up()
                if watched.names != before:
                    words = "the cluster has other nodes now"
                    break
        self._stream.close()
        self._problem = f"{words}; connecting again"

    def _take(self, line: str, watched: Watched) -> None:
        try:
            snapshot = watched.complete(parse_snapshot(line, "the head's figures"), self.now())
        except UsageError as error:
            self._problem = error.message
            return
        with self._changed:
            self._snapshot, self._problem = snapshot, ""
            self._changed.notify_all()
