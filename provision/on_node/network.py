"""Network agent: measures the network between the nodes.

On the head, ``coordinate`` starts the agent on every node over SSH, has each listen on a free port,
distributes the ports, and runs each stage on all nodes in parallel, with a deadline. On each node,
``serve`` executes the head's orders, one per line.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import queue
import secrets
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from provision.on_node.everywhere import over_ssh

_MESSAGE = struct.Struct("!d")
_CONNECT_S = 5.0
_SSH_S = 10.0
_TRIPS, _TRIPS_S = 30, 0.1
_STREAMS = 4
_SEND_S = 1.0
_BLOCK = b"\0" * (1 << 20)
# Seconds per stage, enough for logins, 255 peers that do not answer, or 16 logins that hang.
STAGES = {"listen": 40.0, "reach": 60.0, "ssh": 90.0, "send": 25.0}

# On every node


class PeerListener(threading.Thread):
    """Answers other nodes: a message with the time, a bulk transfer with the number of bytes."""

    def __init__(self, token: bytes) -> None:
        super().__init__(daemon=True)
        self.token = token
        self.socket = socket.create_server(("", 0), backlog=1024)
        self.port: int = self.socket.getsockname()[1]

    def run(self) -> None:
        while True:
            peer, _ = self.socket.accept()
            threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        with peer, suppress(OSError):
            peer.settimeout(20)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            word = receive(peer, len(self.token) + 1)
            if not secrets.compare_digest(word[:-1], self.token):
                return
            while word[-1:] == b"t":
                receive(peer, _MESSAGE.size)
                peer.sendall(_MESSAGE.pack(time.time()))
            buffer, total = bytearray(len(_BLOCK)), 0
            while got := peer.recv_into(buffer):
                total += got
            peer.sendall(_MESSAGE.pack(total))


def receive(peer: socket.socket, size: int) -> bytes:
    """Receive exactly ``size`` bytes. Raises :class:`ConnectionError` if the peer closes earlier."""
    parts = b""
    while len(parts) < size:
        part = peer.recv(size - len(parts))
        if not part:
            raise ConnectionError("closed by the other node")
        parts += part
    return parts


def connect(peer: dict[str, Any], token: bytes, kind: bytes) -> socket.socket:
    """Connect to a peer's listener, by name."""
    found = socket.create_connection((peer["name"], peer["port"]), timeout=_CONNECT_S)
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    found.sendall(token + kind)
    return found


def resolve(name: str) -> str | None:
    """Return the address that a name resolves to on this node."""
    try:
        return str(socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return None


def reach(peer: dict[str, Any], token: bytes, turn: threading.Lock) -> dict[str, Any]:
    """Test name, port, round trip, and clock of one peer. Times are in seconds.

    One thread at a time measures, holding ``turn``: together, they would measure each other.
    """
    answer: dict[str, Any] = {"address": resolve(peer["name"])}
    if answer["address"] is None:
        return {**answer, "error": "its name does not resolve"}
    try:
        with connect(peer, token, b"t") as connection:
            measure_round_trip(connection)  # before the lock: a silent peer delays no other
            with turn:
                end = time.perf_counter() + _TRIPS_S
                trips = [measure_round_trip(connection)]
                while len(trips) < _TRIPS and time.perf_counter() < end:
                    trips.append(measure_round_trip(connection))
    except OSError as error:
        answer["error"] = describe_error(error)
        return answer
    shortest, ahead = min(trips)
    median = statistics.median(trip for trip, _ in trips)
    return {**answer, "round_trip": median, "shortest": shortest, "clock": ahead}


def measure_round_trip(connection: socket.socket) -> tuple[float, float]:
    """Return the seconds of one round trip and how far the peer's clock was ahead at its middle."""
    before, start = time.time(), time.perf_counter()
    connection.sendall(_MESSAGE.pack(before))
    peer_time = _MESSAGE.unpack(receive(connection, _MESSAGE.size))[0]
    trip = time.perf_counter() - start
    return trip, peer_time - (before + trip / 2)


def describe_error(error: OSError) -> str:
    """Return the kernel's message; some Python errors have none."""
    return "timed out" if isinstance(error, socket.timeout) else error.strerror or str(error)


def log_in(peer: dict[str, Any]) -> dict[str, Any]:
    """Log in to a peer over SSH without a password; try twice."""
    for _ in range(2):
        argv = ["ssh", "-o", "ConnectTimeout=5", peer["name"], "true"]
        try:
            done = subprocess.run(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=_SSH_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"error": "timed out"}
        if done.returncode == 0:
            return {}
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return {"error": lines[-1] if lines else f"ssh: exit code {done.returncode}"}


def send(peer: dict[str, Any], token: bytes) -> dict[str, Any]:
    """Measure Gbit/s to one peer over parallel connections, from the bytes the peer received."""
    start = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(_STREAMS) as pool:
        flows = [pool.submit(send_bytes, peer, token) for _ in range(_STREAMS)]
    try:
        total = sum(flow.result() for flow in flows)
    except OSError as error:
        return {"error": describe_error(error)}
    return {"gbit": total * 8 / (time.perf_counter() - start) / 1e9}


def send_bytes(peer: dict[str, Any], token: bytes) -> float:
    """Send for a fixed time and return the number of bytes that arrived."""
    with connect(peer, token, b"f") as connection:
        end = time.perf_counter() + _SEND_S
        while time.perf_counter() < end:
            connection.sendall(_BLOCK)
        connection.shutdown(socket.SHUT_WR)
        return float(_MESSAGE.unpack(receive(connection, _MESSAGE.size))[0])


def for_each(
    work: Callable[[dict[str, Any]], dict[str, Any]], peers: list[dict[str, Any]], width: int
) -> dict[str, Any]:
    """Run the work for each peer, ``width`` at a time; return the answers by peer."""
    with concurrent.futures.ThreadPoolExecutor(width) as pool:
        futures = {peer["name"]: pool.submit(work, peer) for peer in peers}
        return {name: future.result() for name, future in futures.items()}


def serve(token: bytes) -> None:
    """Execute the head's orders, one line of JSON each, until standard input ends."""
    listener = PeerListener(token)
    listener.start()
    reply({"port": listener.port})
    for line in sys.stdin:
        order = json.loads(line)
        peers = order["peers"]
        if order["stage"] == "reach":
            reply(for_each(partial(reach, token=token, turn=threading.Lock()), peers, 32))
        elif order["stage"] == "ssh":
            # sshd accepts few pending logins (MaxStartups): a few at a time, and every node begins
            # with another peer.
            reply(for_each(log_in, peers, 2))
        else:
            reply(for_each(lambda peer: send(peer, token), peers, 1))


def reply(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


# On the head


class AgentSession:
    """The agent on one node: a process over SSH that answers each line with a line."""

    def __init__(self, name: str, plan: dict[str, Any], token: str) -> None:
        self.name = name
        self.error: str | None = None
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.process = subprocess.Popen(
            over_ssh(name, plan["argv"]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            universal_newlines=True,
        )
        threading.Thread(target=self._read, daemon=True).start()
        self.send_line(plan["stdin"].rstrip("\n"))
        self.send_line(json.dumps({"token": token}))

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def send_line(self, line: str) -> None:
        assert self.process.stdin is not None
        with suppress(OSError):  # read_answer reports it
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()

    def read_answer(self, until: float, stage: str) -> dict[str, Any] | None:
        """Return the answer, or ``None`` with the reason in ``error``."""
        try:
            line = self.lines.get(timeout=max(until - time.monotonic(), 0.01))
        except queue.Empty:
            self.error = f"no answer within {STAGES[stage]:.0f} s"
            return None
        if line is None:
            assert self.process.stderr is not None
            said = self.process.stderr.read().strip()
            self.error = said.splitlines()[-1] if said else "it ended without output"
            return None
        answer: dict[str, Any] = json.loads(line)
        return answer


def coordinate(plan: dict[str, Any]) -> dict[str, Any]:
    """Run the stages of a plan on all nodes and return their measurements.

    ``plan`` has the ``nodes``, the agent's ``argv`` and ``stdin``, and the ``peers`` by stage and node.
    """
    token = secrets.token_hex(16)
    agents = {name: AgentSession(name, plan, token) for name in plan["nodes"]}
    try:
        ports = _collect(agents, "listen")
        known = {name: {"name": name, "port": answer["port"]} for name, answer in ports.items()}
        measured: dict[str, Any] = {}
        for stage, targets in plan["peers"].items():
            print(f"stage:{stage}", flush=True)
            for name, agent in agents.items():
                if not agent.error:
                    peers = [known[peer] for peer in targets[name] if peer in known]
                    agent.send_line(json.dumps({"stage": stage, "peers": peers}))
            measured[stage] = _collect(agents, stage)
    finally:
        for agent in agents.values():
            agent.process.kill()
    silent = {name: agent.error for name, agent in agents.items() if agent.error}
    return {"silent": silent, **measured}


def _collect(agents: dict[str, AgentSession], stage: str) -> dict[str, Any]:
    """Return the answers; a node without one is left out of the later stages."""
    until = time.monotonic() + STAGES[stage]
    answers = {n: agent.read_answer(until, stage) for n, agent in agents.items() if not agent.error}
    return {name: answer for name, answer in answers.items() if answer is not None}


def main() -> None:
    """Run as the head if the first line is a plan, as a node if it is a token."""
    first = json.loads(sys.stdin.readline())
    if "token" in first:
        serve(bytes.fromhex(first["token"]))
    else:
        print("links:" + json.dumps(coordinate(first)), flush=True)
    # Do not join threads that still wait for other nodes.
    os._exit(0)
