"""Heartbeat: every rank notices within a minute that another one is lost, and reports which.

The backends don't. Gloo sees a closed connection, but nothing closes when a node is cut off, and its time
limit must be longer than the slowest download. oneCCL's calls wait forever and have no limit.

So each rank keeps a separate connection to rank 0, and a thread at both ends sends a beat every second. In
this star, silence has one cause, so rank 0 knows which rank is lost and tells the others: all ranks report
the same reason. (In a ring or an all-reduce, one lost rank silences others.) The other ranks listen only to
rank 0, so they also know when rank 0 itself is lost.

A rank is lost if its connection closes without a goodbye, or if it is silent for LIMIT_SECONDS: it is cut
off, its node is down, or its process is frozen. The thread beats while the main thread computes,
downloads, or waits. Only a single call that holds the GIL for LIMIT_SECONDS looks like a frozen process.
If two ranks reach rank 0 but not each other, only the backend may notice.

``worker.program`` uses this too: it runs on Python 3.8, without torch.
"""

from __future__ import annotations

import json
import os
import select
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from .events import Events
from .process import RankIdentity, by_torchrun, leave, node_name

BEAT_SECONDS = 1.0
WARN_SECONDS = 20.0
LIMIT_SECONDS = 45.0
"""Longer than network interruptions by a switch or a live migration."""
VERDICT_SECONDS = 5.0
"""Time for rank 0 to notice a closed connection and to tell the others."""
_LAST_WORDS_SECONDS = 5.0
"""Time to print the reason. On a node that is cut off, nobody reads the output, and printing may block."""
_CONNECT_SECONDS, _MEET_SECONDS = 5.0, 30.0


class Lost(NamedTuple):
    """A lost rank and how it was detected."""

    rank: int
    host: str
    how: str
    hint: str


class Link:
    """A connection to another rank, which sends lines of JSON. ``rank`` is None until it said hello."""

    def __init__(self, connection: socket.socket, now: float) -> None:
        connection.setblocking(False)
        # A message that waits for others to be acknowledged is lost if this process ends with unread beats:
        # the goodbye would be.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection, self._unread = connection, b""
        self.rank: int | None = None
        self.host = ""
        self.heard = now
        self.closed = self.left = self.warned = self.done = False

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}"

    def send(self, **message: object) -> None:
        """Send a message; an empty message is a beat."""
        with suppress(OSError):  # reading detects a broken connection
            self.connection.send(json.dumps(message).encode() + b"\n")

    def receive(self, now: float) -> list[dict[str, Any]]:
        """Return the messages that have arrived."""
        try:
            while data := self.connection.recv(4096):
                self._unread, self.heard = self._unread + data, now
            self.closed = True
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True
        *lines, self._unread = self._unread.split(b"\n")
        try:
            return [dict(json.loads(line)) for line in lines]
        except (ValueError, TypeError):  # not a rank
            self.closed = True
            return []

    def lost(self, now: float) -> Lost | None:
        """Return whether this rank is lost."""
        assert self.rank is not None
        if self.closed:
            hint = f"unless rank {self.rank} reports the cause, it was killed, or its node is gone"
            return Lost(self.rank, self.host, "its process ended", hint)
        if now - self.heard < LIMIT_SECONDS:
            return None
        hint = "its node is down or cut off, or its process is frozen"
        return Lost(self.rank, self.host, f"no answer for {LIMIT_SECONDS:.0f} s", hint)


class Heartbeat:
    """A rank's side of the heartbeat. A lost rank ends this process, with exit code 1."""

    def __init__(
        self, identity: RankIdentity, events: Events, environ: Mapping[str, str] = os.environ
    ) -> None:
        self._identity, self._events = identity, events
        # Next to torch's port; user programs tend to use the port above it.
        port = int(environ.get("MASTER_PORT", "29500")) - 1
        self._address = environ.get("MASTER_ADDR", ""), port
        # Kubeflow's operators may call the first pod localhost, or by a name that is not known yet:
        # https://github.com/kubeflow/trainer/issues/2331
        self._own_address = ("", port) if by_torchrun(environ) else self._address
        self._listener: socket.socket | None = None
        self._links: list[Link] = []
        self._stopped, self._stays = threading.Event(), False
        self._lock = threading.Lock()  # held by the thread while it is active
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Watch the other ranks as they connect. A single rank needs no thread."""
        if self._identity.size > 1:
            self._thread.start()

    def meet(self) -> None:
        """Wait, for a limited time, until rank 0 would notice the loss of this rank."""
        until = time.monotonic() + _MEET_SECONDS
        while not self._links and time.monotonic() < until:
            time.sleep(BEAT_SECONDS / 20)

    def stop(self, *, goodbye: bool) -> None:
        """Stop watching. Without a ``goodbye``, the others take this rank's end for a failure."""
        with self._lock:
            self._stopped.set()
            for link in self._links if goodbye else ():
                link.send(bye=True)

    def wait_for_verdict(self) -> None:
        """Wait a few seconds for the heartbeat, which ends this process if a rank is lost."""
        if self._thread.is_alive():
            self._thread.join(VERDICT_SECONDS)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which watches the others."""
        return self._identity.rank == 0

    def stay(self) -> None:
        """Wait until the programs of all ranks have ended."""
        with self._lock:
            self._stays = True
            for link in [] if self.is_first else self._links:
                link.send(done=True)
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            if self._identity.rank == 0:
                # A cluster of Kubernetes may have IPv6 only.
                both = not self._own_address[0] and socket.has_dualstack_ipv6()
                self._listener = socket.create_server(
                    self._own_address,
                    family=socket.AF_INET6 if both else socket.AF_INET,
                    backlog=self._identity.size,
                    dualstack_ipv6=both,
                )
                self._listener.setblocking(False)
        except OSError as error:
            self._events.warn(f"warning: a lost rank will not be noticed: {error}")
            return
        while not self._stopped.is_set():
            self._pause()
            connected = None if self._listener or self._links else self._connect()
            # Before reading: time in which this process is frozen must not count as the others' silence.
            now = time.monotonic()
            with self._lock:
                if self._stopped.is_set() or (
                    self._stays and all(link.done for link in self._links)
                ):
                    return
                self._meet(connected, now)
                self._beat(now)

    def _pause(self) -> None:
        """Wait until the next beat is due, a rank connects, or a connection closes."""
        changes = select.poll()
        if self._listener:
            # A rank that has not been greeted yet would not notice the loss of this one.
            changes.register(self._listener, select.POLLIN)
        for link in self._links:
            changes.register(link.connection, select.POLLRDHUP)
        changes.poll(BEAT_SECONDS * 1000)

    def _connect(self) -> socket.socket | None:
        try:
            return socket.create_connection(self._address, _CONNECT_SECONDS)
        except OSError:
            return None  # rank 0 has not started yet, or has ended

    def _meet(self, connected: socket.socket | None, now: float) -> None:
        """Greet every new connection."""
        found = [connected] if connected else []
        if self._listener:
            with suppress(OSError):  # until none is left
                while True:
                    found.append(self._listener.accept()[0])
        for connection in found:
            link = Link(connection, now)
            link.send(rank=self._identity.rank, host=node_name())
            self._links.append(link)

    def _beat(self, now: float) -> None:
        for link in self._links:
            for message in link.receive(now):
                if "lost" in message:
                    self._give_up(Lost(*message["lost"]))
                if "rank" in message:
                    link.rank, link.host = message["rank"], message["host"]
                link.left = link.left or "bye" in message
                link.done = link.done or "done" in message
            link.send()
            if link.rank is not None and not link.left:
                self._judge(link, now)
        if self._identity.rank and any(link.left for link in self._links):
            self._stopped.set()  # rank 0 has left
        for link in [each for each in self._links if each.left or each.closed]:
            link.connection.close()
            self._links.remove(link)

    def _judge(self, link: Link, now: float) -> None:
        lost = link.lost(now)
        if lost:
            self._give_up(lost)
        silent = now - link.heard
        if (silent >= WARN_SECONDS) == link.warned:
            return
        link.warned = not link.warned
        text = f"has not answered for {silent:.0f} s; the job ends at {LIMIT_SECONDS:.0f} s"
        if self._identity.rank <= 1:  # one report of a lost rank 0 is enough
            self._events.warn(f"{link} {text if link.warned else 'answers again'}")

    def _give_up(self, lost: Lost) -> None:
        """Tell the others which rank is lost, print it, and end the process."""
        for link in self._links:
            if link.rank != lost.rank:
                link.send(lost=lost)
        timer = threading.Timer(_LAST_WORDS_SECONDS, os._exit, [1])
        timer.daemon = True
        timer.start()
        message = f"lost contact with rank {lost.rank} on {lost.host}: {lost.how}"
        self._events.error(message, lost.hint, lost_peer=True)
        leave(1)
