"""The nodes measure the ways between them. Runs on the nodes: standard library only, Python 3.8 on.

One program in two parts. On the head, ``conduct`` enters every node over node-to-node SSH, has each
listen on a port of its own, hands round who listens where, and takes them through the stages
together; no stage waits for a node longer than its deadline. On each node, ``serve`` does what it is
told, line by line. Both are started with this source on standard input, so nothing stays on a disk.
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
from typing import Any

START = "import base64,sys;SOURCE=sys.stdin.readline();exec(base64.b64decode(SOURCE))"
"""For `python -c`: this source, in base64, is the first line of its standard input."""
_MESSAGE = struct.Struct("!d")
_CONNECT_S = 5.0
_SSH_S = 10.0
_TRIPS = 30
_STREAMS = 4
_SEND_S = 1.0
_BLOCK = b"\0" * (1 << 20)
# Seconds for all nodes to end a stage: logins, 255 peers that do not answer, 16 logins that hang.
STAGES = {"listen": 40.0, "reach": 60.0, "ssh": 90.0, "send": 25.0}

# What every node does


class Listener(threading.Thread):
    """Answers the other nodes: each message with the time, a flood with the number of its bytes."""

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
        with peer:
            peer.settimeout(20)
            try:
                word = receive(peer, len(self.token) + 1)
                if not secrets.compare_digest(word[:-1], self.token):
                    return
                if word[-1:] == b"t":
                    self._tell_time(peer)
                else:
                    self._count(peer)
            except OSError:
                return

    def _tell_time(self, peer: socket.socket) -> None:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            receive(peer, _MESSAGE.size)
            peer.sendall(_MESSAGE.pack(time.time()))

    def _count(self, peer: socket.socket) -> None:
        buffer, total = bytearray(len(_BLOCK)), 0
        while True:
            got = peer.recv_into(buffer)
            if not got:
                break
            total += got
        peer.sendall(_MESSAGE.pack(total))


def receive(peer: socket.socket, size: int) -> bytes:
    """Exactly so many bytes; raises :class:`ConnectionError` where the other side ends before."""
    parts = b""
    while len(parts) < size:
        part = peer.recv(size - len(parts))
        if not part:
            raise ConnectionError("closed by the other node")
        parts += part
    return parts


def open_to(peer: dict[str, Any], token: bytes, kind: bytes) -> socket.socket:
    """A connection to a peer's listener, by its name."""
    found = socket.create_connection((peer["name"], peer["port"]), timeout=_CONNECT_S)
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    found.sendall(token + kind)
    return found


def resolve(name: str) -> str | None:
    """The address to which a name leads here."""
    try:
        return str(socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return None


def reach(peer: dict[str, Any], token: bytes) -> dict[str, Any]:
    """Name, port, round trip and clock of one peer. Seconds, without a unit in the name."""
    answer: dict[str, Any] = {"address": resolve(peer["name"])}
    if answer["address"] is None:
        return {**answer, "error": "its name leads nowhere"}
    try:
        with open_to(peer, token, b"t") as connection:
            trips = [take_trip(connection) for _ in range(_TRIPS)]
    except OSError as error:
        answer["error"] = describe_error(error)
        return answer
    shortest, ahead = min(trips)
    median = statistics.median(trip for trip, _ in trips)
    return {**answer, "round_trip": median, "shortest": shortest, "clock": ahead}


def take_trip(connection: socket.socket) -> tuple[float, float]:
    """The seconds of one round trip, and how far the peer's clock was ahead in its middle."""
    before, start = time.time(), time.perf_counter()
    connection.sendall(_MESSAGE.pack(before))
    told = _MESSAGE.unpack(receive(connection, _MESSAGE.size))[0]
    trip = time.perf_counter() - start
    return trip, told - (before + trip / 2)


def describe_error(error: OSError) -> str:
    """The kernel's words for an error, which some of Python's own lack."""
    return "timed out" if isinstance(error, socket.timeout) else error.strerror or str(error)


def enter(peer: dict[str, Any]) -> dict[str, Any]:
    """Enter a peer over SSH without a password; a second time where the first was refused."""
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
    return {"error": lines[-1] if lines else f"ssh ended with {done.returncode}"}


def send(peer: dict[str, Any], token: bytes) -> dict[str, Any]:
    """Gbit/s to one peer, over some connections at once, as it counted the bytes."""
    start = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(_STREAMS) as pool:
        flows = [pool.submit(flood, peer, token) for _ in range(_STREAMS)]
    try:
        total = sum(flow.result() for flow in flows)
    except OSError as error:
        return {"error": describe_error(error)}
    return {"gbit": total * 8 / (time.perf_counter() - start) / 1e9}


def flood(peer: dict[str, Any], token: bytes) -> float:
    """Send for a while; returns how many bytes arrived."""
    with open_to(peer, token, b"f") as connection:
        end = time.perf_counter() + _SEND_S
        while time.perf_counter() < end:
            connection.sendall(_BLOCK)
        connection.shutdown(socket.SHUT_WR)
        return float(_MESSAGE.unpack(receive(connection, _MESSAGE.size))[0])


def at_once(
    work: Callable[[dict[str, Any]], dict[str, Any]], peers: list[dict[str, Any]], width: int
) -> dict[str, Any]:
    """The same with each peer, some at a time; the answers by the peer's name."""
    with concurrent.futures.ThreadPoolExecutor(width) as pool:
        futures = {peer["name"]: pool.submit(work, peer) for peer in peers}
        return {name: future.result() for name, future in futures.items()}


def serve(token: bytes) -> None:
    """Do what the head says, a line of JSON at a time; ends when it says no more."""
    listener = Listener(token)
    listener.start()
    reply({"port": listener.port})
    for line in sys.stdin:
        order = json.loads(line)
        peers = order["peers"]
        if order["stage"] == "reach":
            reply(at_once(lambda peer: reach(peer, token), peers, 32))
        elif order["stage"] == "ssh":
            # A node's sshd lets only 10 strangers wait at once (MaxStartups): few at a time, and
            # every node begins with another one.
            reply(at_once(enter, peers, 2))
        else:
            reply(at_once(lambda peer: send(peer, token), peers, 1))


def reply(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


# What the head does besides


class Player:
    """A node as the head sees it: a process over SSH that answers each line with a line."""

    def __init__(self, name: str, python: str, source: str, token: str) -> None:
        self.name = name
        self.error: str | None = None
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.process = subprocess.Popen(
            ["ssh", "-o", "ConnectTimeout=20", name, f"{python} -c '{START}'"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            universal_newlines=True,
        )
        threading.Thread(target=self._read, daemon=True).start()
        self.tell(source.rstrip("\n"))
        self.tell(json.dumps({"token": token}))

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        except OSError:
            return  # its silence will be noticed

    def hear(self, until: float, stage: str) -> dict[str, Any] | None:
        """Its answer; ``None``, and the reason in ``error``, where it gives none in time."""
        try:
            line = self.lines.get(timeout=max(until - time.monotonic(), 0.01))
        except queue.Empty:
            self.error = f"no answer within {STAGES[stage]:.0f} s"
            return None
        if line is None:
            self.error = self._last_words()
            return None
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_words(self) -> str:
        assert self.process.stderr is not None
        lines = self.process.stderr.read().strip().splitlines()
        return lines[-1] if lines else "it ended without a word"

    def end(self) -> None:
        self.process.kill()


def conduct(plan: dict[str, Any], source: str) -> dict[str, Any]:
    """Take the nodes through the stages of a plan; returns what each said of its peers.

    ``plan`` has the ``nodes``, the shell's words for their ``python``, and by stage and node the ``peers``.
    """
    token = secrets.token_hex(16)
    players = {name: Player(name, plan["python"], source, token) for name in plan["nodes"]}
    try:
        ports = _together(players, "listen")
        known = {name: {"name": name, "port": told["port"]} for name, told in ports.items()}
        told: dict[str, Any] = {}
        for stage, wished in plan["peers"].items():
            print(f"stage:{stage}", flush=True)
            for name, player in players.items():
                if not player.error:
                    peers = [known[peer] for peer in wished[name] if peer in known]
                    player.tell(json.dumps({"stage": stage, "peers": peers}))
            told[stage] = _together(players, stage)
    finally:
        for player in players.values():
            player.end()
    silent = {name: player.error for name, player in players.items() if player.error}
    return {"silent": silent, **told}


def _together(players: dict[str, Player], stage: str) -> dict[str, Any]:
    """The answers of those that give one; who does not is left out from then on."""
    until = time.monotonic() + STAGES[stage]
    heard = {n: player.hear(until, stage) for n, player in players.items() if not player.error}
    return {name: answer for name, answer in heard.items() if answer is not None}


def main() -> None:
    """On a node the first line is a token; on the head it is the plan."""
    first = json.loads(sys.stdin.readline())
    if "token" in first:
        serve(bytes.fromhex(first["token"]))
    else:
        print("links:" + json.dumps(conduct(first, globals()["SOURCE"])), flush=True)
    # Threads that still wait for other nodes must not hold up the end.
    os._exit(0)


if __name__ == "__main__":
    main()
