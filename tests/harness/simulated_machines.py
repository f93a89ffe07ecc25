"""Simulated machines in a folder, one per instance: what SSH would find on them.

Everything is in files, so a killed process leaves the machines as they were, like real ones.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import re
import struct
import tarfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from cluster.local_files import ClusterFiles
from cluster.nodes import Node
from infra.errors import HostKeyError, NoAnswerError
from provision.host import Host, Result
from provision.host_keys import pin_host_keys, pinned_host_keys
from provision.install import stack_digest
from provision.stacks.load import load_stack, shipped_names
from provision.stacks.stack import Stack
from provision.user_data import SHOW_EXPIRY
from tests.fakes import AMX, StandInHost, facts_answer, health_answer
from tests.infra.local.fakes import FakeTime

# Takes the step's name and "before" or "after".
Hook = Callable[[str, str], None]
_MESH = "/tmp/spr-cluster-mesh.tar"
_NOW = 1_800_000_000.0
# MiB that the first import of torch reads, and of these the probe; pieces that the boot reads at once.
_VENV_MIB, _PROBE_MIB, _READ_AT_ONCE = 1000, 20, 8
_LINK: dict[str, dict[str, Any]] = {
    "reach": {"round_trip": 60e-6, "shortest": 50e-6, "clock": 0.0},
    "ssh": {},
    "send": {"gbit": 20.0},
}


@dataclass(frozen=True)
class SimulatedMachines:
    """The folder of all machines; ``on_step`` is called before and after each command."""

    root: Path
    on_step: Hook = lambda _name, _moment: None
    clock: FakeTime = field(default_factory=FakeTime)
    why_closed: Callable[[str, bool], str] = lambda _instance_id, _inside: ""
    """Why the network lets no connection from the tool, or inside, to a machine; "" if it does."""

    @property
    def cut(self) -> Path:
        """A file that exists while the network is cut for tools in other processes than the cloud's."""
        return self.root / "cut"

    def begin(
        self,
        instance_id: str,
        address: str,
        fate: str,
        image: str,
        user_data: str,
        first_read_mib_s: float | None,
    ) -> None:
        """Start a machine; ``image`` names the disk that it has a copy of, which is slow at first."""
        # As the boot scripts get them.
        expires, mtu = (
            re.search(rf"{name}=(\d+)", user_data) for name in ("launch_expires", "mtu")
        )
        rest = re.findall(r"launch_(?:latest|grace)=(\d+)|echo (\d+) >\S+-idle", user_data)
        folder = self.root / instance_id
        folder.mkdir(parents=True, exist_ok=True)
        disk: dict[str, Any] = {"installed": "", "clean": True}
        with suppress(FileNotFoundError):
            disk = json.loads((self.root / f"image-{image}.json").read_text())
        if not disk["clean"]:
            (self.root / "defect").write_text(f"{instance_id} has another machine's private keys")
        installed = disk["installed"]
        state = {
            "address": address,
            "fate": fate,
            "installed": installed,
            "launch_expires": int(expires[1]) if expires else None,
            "rest": " ".join(map("".join, rest)),
            "mtu": int(mtu[1]) if mtu else 9001,
            "first_read_mib_s": first_read_mib_s,
            "booted": self.clock.now,
            "reads_ahead": "spr-cluster-warm" in user_data,
        }
        write_state(folder / "state.json", state)

    def end(self, instance_id: str) -> None:
        """Remove a machine and its disk."""
        folder = self.root / instance_id
        for path in folder.glob("*"):
            path.unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            folder.rmdir()

    def copy_disk(self, instance_id: str, image: str) -> None:
        """An image is made: software goes into it, and the identity if it is not sealed away."""
        state = self.read(instance_id)
        disk = {"installed": state["installed"], "clean": _is_sealed(state)}
        write_state(self.root / f"image-{image}.json", disk)

    def read(self, instance_id: str) -> dict[str, Any]:
        """Return a machine's state. Raises :class:`FileNotFoundError` if there is no such machine."""
        content: dict[str, Any] = json.loads((self.root / instance_id / "state.json").read_text())
        return content

    def make_host(self, node: Node, files: ClusterFiles) -> Host:
        """Return a machine's host, for :class:`cluster.context.Context`."""
        return SimulatedHost(self, node, files)


def write_state(path: Path, content: dict[str, Any]) -> None:
    fresh = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
    fresh.write_text(json.dumps(content))
    fresh.replace(path)


def _is_sealed(state: dict[str, Any]) -> bool:
    """A seal ends with the process whose connection made it."""
    if not state.get("seal"):
        return False
    try:
        status = Path(f"/proc/{state['seal_pid']}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


@cache
def _stacks() -> dict[str, Stack]:
    found = [load_stack(name) for name in shipped_names()]
    return {stack_digest(stack): stack for stack in found}


def _health_of(state: dict[str, Any], now: float) -> dict[str, Any]:
    """A machine of the default type with the stack that was installed; ``health`` changes parts."""
    stack = _stacks().get(state["installed"], load_stack("upstream"))
    expires = state.get("expires", state["launch_expires"])
    shown = f"{expires} {state['rest']}" if state.get("timer", "runs") == "runs" else ""
    parts: dict[str, Any] = {"mark": state["installed"], "said": {SHOW_EXPIRY: shown}}
    parts["mtus"] = {state["address"]: state["mtu"]}
    parts["reading_disk"] = state["reads_ahead"] and _left_to_read_s(state, _VENV_MIB, now) > 0
    changed = state.get("health", {})
    parts |= {**changed, "said": {**parts["said"], **changed.get("said", {})}}
    if state["fate"] == "no-amx":
        parts |= {"amx": [], "tile_data": "ENOTSUP"}
    hostname = f"host-{state['id']}"
    return health_answer(stack, hostname=hostname, address=state["address"], time=_NOW, **parts)


def host_key_of(instance_id: str) -> str:
    """Return a machine's host key, which no other machine has."""
    kind, key = b"ssh-ed25519", hashlib.sha256(instance_id.encode()).digest()
    blob = struct.pack(f">I{len(kind)}sI{len(key)}s", len(kind), kind, len(key), key)
    return f"{kind.decode()} {base64.b64encode(blob).decode()}"


def _left_to_read_s(state: dict[str, Any], mib: int, now: float) -> float:
    """How long the first read of a part of the environment takes from now on."""
    rate: float = state["first_read_mib_s"] or 0
    if not rate or state.get("read_mib", 0) >= mib:
        return 0
    ahead: float = state["booted"] + _VENV_MIB / rate / _READ_AT_ONCE - now
    return max(0, min(mib / rate, ahead) if state["reads_ahead"] else mib / rate)


class SimulatedHost(StandInHost):
    """A host on one simulated machine."""

    def __init__(self, machines: SimulatedMachines, node: Node, files: ClusterFiles) -> None:
        self._machines, self._node, self._files = machines, node, files
        self.name = node.name
        self._id = node.instance.id
        self._answers: list[tuple[str, Callable[[str], Result]]] = [
            ("^true$", self._greet),
            ("cloud-init status --wait", lambda _: Result(0, "status: done", "")),
            ("^# querying the facts", self._facts),
            ("spr-cluster-install.sh", self._install),
            ("# sealing the disk", self._seal),
            ("/run/spr-cluster/unseal", self._unseal),
            ('tar -C "\\$HOME"', self._unpack),
            ("ssh-keyscan", self._scan),
            ("# querying the health of all nodes", self._hear_all),
            ("# querying the health", self._describe),
            ("# testing the network between the nodes", self._hear_links),
            ("bin/mpirun -f", self._hello),
            ("spr-cluster-expires", self._extend),
            ("# listing what would be lost", lambda _: Result(0, "", "")),
            ("^echo; timeout 20 squeue ", self._list_busy),
            ("# listing the nodes", self._list_nodes),
            ("# listing the jobs", lambda _: Result(0, self._state().get("listing", ""), "")),
            ("# asking the queue", self._list_queue),
            ("# asking how busy the queue is", self._show_queue),
            ("# submitting the jobs of the lost head", lambda _: Result(0, "", "")),
            (r"cat ~/spr-jobs/\.events", lambda _: Result(0, "", "")),
            ("ls -A spr-jobs", lambda _: Result(0 if self._state().get("jobs") else 1, "", "")),
        ]

    def answer(self, command: str, timeout_s: float | None) -> Result:
        state = self._state()
        if state["fate"] == "no-ssh":
            raise NoAnswerError(self.name, f"no SSH at {state['address']}: connection refused")
        for pattern, answer in self._answers:
            if re.search(pattern, command):
                self._machines.on_step(pattern, "before")
                done = answer(command)
                self._machines.on_step(pattern, "after")
                return done
        raise AssertionError(f"unexpected command on {self.name}: {command}")

    def _state(self) -> dict[str, Any]:
        if self._machines.cut.exists() or self._machines.why_closed(
            self._id, bool(self._node.jump)
        ):
            raise NoAnswerError(self.name, "no SSH: timed out")
        try:
            return self._machines.read(self._id)
        except FileNotFoundError:
            raise NoAnswerError(self.name, "no SSH: timed out") from None

    def _change(self, **values: Any) -> None:
        write_state(self._machines.root / self._id / "state.json", {**self._state(), **values})

    def put(self, content: bytes, path: str, mode: int = 0o600) -> None:
        self._state()
        self._machines.on_step(f"put {path}", "before")
        (self._machines.root / self._id / Path(path).name).write_bytes(content)
        self._machines.on_step(f"put {path}", "after")

    def _greet(self, _: str) -> Result:
        known, key = self._files.known_hosts, host_key_of(self._id)
        if key not in (pinned_host_keys(known, self._id) or (key,)):
            raise HostKeyError(self.name, f"{self._id} shows another SSH host key than it had")
        pin_host_keys(known, self._id, [key])
        return Result(0, "", "")

    def _facts(self, _: str) -> Result:
        state = self._state()
        flags = "avx512f" if state["fate"] == "no-amx" else AMX
        answer = facts_answer(
            hostname=f"host-{self._id}", address=state["address"], flags=flags
        ).replace("ssh-ed25519 AAAAC3Nz", host_key_of(self._id))
        return Result(0, answer, "")

    def _install(self, command: str) -> Result:
        script = self._machines.root / self._id / "spr-cluster-install.sh"
        assert script.exists(), "the installation's script is not there"
        digest = re.search(r"install\.sh (\w+)", command)
        proxy = re.match(r"env HTTP_PROXY=(\S+)", command)
        self._change(installed=digest[1] if digest else "unknown", proxy=proxy[1] if proxy else "")
        return Result(0, "", "")

    def _seal(self, command: str) -> Result:
        token = re.search(r"^token=(\w+)", command, re.MULTILINE)
        assert token, "a seal without a token"
        self._change(seal=token[1], seal_pid=os.getpid())
        return Result(0, "", "")

    def _unseal(self, command: str) -> Result:
        state = self._state()
        whole = _is_sealed(state) and f"unseal {state['seal']}" in command
        self._change(seal="")
        return Result(0, "unbroken\n" if whole else "broken\n", "")

    def _unpack(self, _: str) -> Result:
        bundle = self._machines.root / self._id / Path(_MESH).name
        content = bundle.read_bytes()
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            hosts = archive.extractfile("hosts")
            assert hosts is not None
            names = hosts.read().decode().split()
            config = archive.extractfile(".ssh/config")
            assert config is not None
            addresses = re.findall(r"HostName (\S+)", config.read().decode())
        digest = hashlib.sha256(content).hexdigest()
        bundle.unlink()
        self._change(mesh=digest, names=dict(zip(names, addresses, strict=True)))
        return Result(0, "", "")

    def _all_machines(self) -> dict[str, dict[str, Any]]:
        found = {}
        for path in self._machines.root.glob("i-*"):
            with suppress(FileNotFoundError):
                state = self._machines.read(path.name)
                found[state["address"]] = {**state, "id": path.name}
        return found

    def _scan(self, command: str) -> Result:
        machines = self._all_machines()
        lines = [
            f"{address} {host_key_of(machines[address]['id'])}\n"
            for address in re.findall(r"\d+\.\d+\.\d+\.\d+", command)
            if address in machines
        ]
        return Result(0, "".join(lines), "")

    def _read_disks(self, mib: int, command: str) -> bool:
        """Wait until all nodes have read so much of their environment, or until the command's limit."""
        limit = re.search(r"(?:timeout -k 5|.limit_s.:) (\d+)", command)
        now, machines = self._machines.clock.now, self._all_machines()
        names = self._state().get("names", {})
        nodes = [machines[address] for address in names.values() if address in machines]
        wait = max((_left_to_read_s(node, mib, now) for node in nodes), default=0)
        self._machines.clock.sleep(min(wait, float(limit[1]) if limit else wait))
        if limit and wait > float(limit[1]):
            return False
        for node in nodes if wait else ():
            path = self._machines.root / node["id"] / "state.json"
            write_state(path, {**self._machines.read(node["id"]), "read_mib": mib})
        return True

    def _hear_all(self, command: str) -> Result:
        """Nodes answer the head when they run, have the software, and know the same key."""
        in_time = self._read_disks(_PROBE_MIB, command)
        state, machines = self._state(), self._all_machines()
        lines = []
        for name, address in state.get("names", {}).items():
            other = machines.get(address, {})
            good = bool(other.get("installed")) and other.get("mesh") == state["mesh"]
            good = good and other.get("fate") != "no-ssh"
            now = self._machines.clock.now
            said = json.dumps(_health_of(other, now)) if good else "no route"
            code = (0 if in_time else None) if good else 255
            row = {"node": name, "code": code, "text": said, "began": _NOW, "ended": _NOW}
            lines.append(f"{json.dumps(row)}\n")
        return Result(0, "".join(lines), "")

    def _describe(self, _: str) -> Result:
        """The machine, as it tells this one of itself."""
        state = {**self._state(), "id": self._id}
        return Result(0, json.dumps(_health_of(state, self._machines.clock.now)), "")

    def _hear_links(self, command: str) -> Result:
        """All ways between the nodes are good, but those to a node that is said to be closed."""
        (line,) = (line for line in command.splitlines() if line.startswith('{"argv"'))
        plan = json.loads(line)
        names, machines = self._state()["names"], self._all_machines()
        result: dict[str, Any] = {"silent": {}}
        for stage, peers in plan["peers"].items():
            result[stage] = {
                source: {
                    target: _LINK[stage]
                    | ({"address": names[target]} if stage == "reach" else {})
                    | machines[names[target]].get("closed", {}).get(stage, {})
                    for target in targets
                }
                for source, targets in peers.items()
            }
        return Result(0, f"stage:reach\nlinks:{json.dumps(result)}\n", "")

    def _hello(self, command: str) -> Result:
        if not self._read_disks(_VENV_MIB, command):
            return Result(124, "", "")
        ranks = range(len(self._state()["names"]))
        return Result(0, "".join(f"hello {rank} torch 2.13.0+cpu\n" for rank in ranks), "")

    def _list_queue(self, _: str) -> Result:
        """Slurm uses all nodes, but those that are said to be in another state."""
        state = self._state()
        told = state.get("queue", {})
        lines = [f"{name}|{told.get(name, 'idle|none')}\n" for name in state.get("names", {})]
        return Result(0, "".join(lines), "")

    def _show_queue(self, command: str) -> Result:
        told = self._list_queue(command).stdout.splitlines()
        nodes = [f"{line.rpartition('|')[0]}|0/2/0/2" for line in told]
        return Result(0, "\n".join([*nodes, self._list_busy(command).stdout]), "")

    def _list_busy(self, _: str) -> Result:
        """The job of the state ``job`` runs on all nodes, or on those of ``job_nodes``."""
        state = self._state()
        nodes = ",".join(state.get("job_nodes", state.get("names", ())))
        slurm = state.get("job_state", "RUNNING")
        row = f"1|{slurm}|{nodes}|None|{state['job']}\n" if state.get("job") else ""
        return Result(0, row, "")

    def _list_nodes(self, _: str) -> Result:
        rows = (f"{name} {address}\n" for name, address in self._state()["names"].items())
        return Result(0, "".join(rows), "")

    def _extend(self, command: str) -> Result:
        """Set the time at which the machine ends, and start its timer, unless that is ``broken``."""
        epoch = re.search(r"(\d{10}) \W*(\d{10} \d+)", command)
        idle = re.search(r"n\S* (\d+) >\$new", command)
        assert epoch, "no time"
        assert idle, "no timeout"
        rest = f"{epoch[2]} {idle[1]}"
        self._change(expires=int(epoch[1]), rest=rest)
        if self._state().get("timer") == "broken":
            return Result(1, "", "Unit spr-cluster-expiry.timer is masked.")
        self._change(timer="runs")
        return Result(0, f"{epoch[1]} {rest}\n", "")
