"""The cores of a job that shares its nodes, and the limits that protect its neighbors.

``cores JOB`` prints each node's part as JSON. Slurm's task prolog runs ``hold JOB PID``: it moves a task to
its job's cores and slice, and starts ``guard JOB NAME MEMORY``, which ends the job on this node if it takes
more than its part. Where systemd can use the kernel's controllers, these limit the slice as well.

All run as the job's user: in a container, even root can neither pin nor inspect another user's processes.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

PROGRAM, CORES = "/etc/slurm/spr-cluster-limits", "/etc/slurm/spr-cluster-cores"
"""This file on a node; and by node, its physical cores in Slurm's order: NUMA node, then CPUs."""
REPORT = "limited"
"""In a job's folder on a node: why the guard ended the job there."""
MOST_PROCESSES = 4096
_NODES_MOST = (Path("/sys/fs/cgroup/pids/pids.max"), Path("/sys/fs/cgroup/pids.max"))
"""The limit of a node that is a container."""
_JOBS = Path("/home/ubuntu/spr-jobs")
_PART = re.compile(r" Nodes=(\S+) CPU_IDs=(\S+) Mem=(\d+)")
_POLL_S, _KILL_S = 0.2, 20.0
_ROOT = ("sudo", "-n")
_SHM = "/dev/shm/"
_MANAGER = ("org.freedesktop.systemd1", "/org/freedesktop/systemd1")
_RSS = re.compile(r"^Rss(Anon|Shmem):\s+(\d+)", re.MULTILINE)
_PSS = re.compile(r"^Pss_(Anon|Shmem):\s+(\d+)", re.MULTILINE)
_OOM_KILLS = re.compile(r"^oom_kill [1-9]", re.MULTILINE)


class Part(NamedTuple):
    """A job's part of a node: numbers of cores in Slurm's order, the cores, and MiB of memory."""

    numbers: list[int]
    cores: list[list[int]]
    memory_mib: int
    is_whole: bool


def parse_numbers(text: str) -> list[int]:
    """Parse Slurm's list of numbers, such as ``0-3,8``."""
    pairs = (each.partition("-") for each in text.split(","))
    return [n for low, _, high in pairs for n in range(int(low), int(high or low) + 1)]


def find_parts(job: str, known: dict[str, list[list[int]]]) -> dict[str, Part]:
    """Return a running job's part of each of its nodes."""
    found = {}
    for names, numbers, memory in _PART.findall(_ask("scontrol", "-o", "-d", "show", "job", job)):
        chosen = parse_numbers(numbers)
        for name in _ask("scontrol", "show", "hostnames", names).split():
            cores = [known[name][number] for number in chosen]
            found[name] = Part(chosen, cores, int(memory), len(cores) == len(known[name]))
    return found


def main() -> None:
    verb, job, *more = sys.argv[1:]
    if verb == "guard":
        Guard(job, more[0], int(more[1])).run()
        return
    if verb == "hold":
        name = os.environ.get("SLURMD_NODENAME", "")
        try:
            part = find_parts(job, json.loads(Path(CORES).read_text()))[name]
            # Only a job of other tools may take a whole node without limits.
            is_free = part.is_whole and not os.environ.get("SPR_CORES")
            why = "" if is_free else hold(job, int(more[0]), part)
        except (OSError, ValueError, LookupError, subprocess.SubprocessError) as error:
            why = repr(error)
        if why:
            # Slurm prints it in the task's output: https://slurm.schedmd.com/prolog_epilog.html
            shown = f"on {name}, this job can take its neighbors' cores and memory: {why}"
            print(f"print warning: {shown}")
        return
    parts = find_parts(job, json.loads(Path(CORES).read_text()))
    print(json.dumps({name: part._asdict() for name, part in parts.items()}))


def hold(job: str, pid: int, part: Part) -> str:
    """Keep a process and its children in the job's part of this node; return why not, or ""."""
    cpus = [cpu for _, *each in part.cores for cpu in each]
    os.sched_setaffinity(pid, cpus)
    name = os.environ.get("SLURM_JOB_NAME", "").replace("/", "_")
    unit, memory = f"spr-{job}.slice", str(part.memory_mib)
    limits = [f"MemoryMax={memory}M", "MemorySwapMax=0", f"TasksMax={2 * MOST_PROCESSES}"]
    limits.append(f"AllowedCPUs={','.join(map(str, cpus))}")
    _ask(*_ROOT, "systemctl", "set-property", "--runtime", unit, *limits)
    start = [*_MANAGER, "org.freedesktop.systemd1.Manager", "StartTransientUnit"]
    # systemd-run would start a program: this one runs already, with files that mpirun opened.
    scope = [f"spr-{job}-{pid}.scope", "fail", "3", "PIDs", "au", "1", str(pid), "Slice", "s", unit]
    scope += ["TasksMax", "t", str((1 << 64) - 1)]
    if why := _find_error(*_ROOT, "busctl", "call", *start, "ssa(sv)a(sa(sv))", *scope, "0"):
        return why
    guard = ["python3", "-I", "-S", PROGRAM, "guard", job, name, memory]
    how = ["--quiet", "--collect", f"--unit=spr-guard-{job}", f"--uid={os.getuid()}"]
    unguarded = _find_error(*_ROOT, "systemd-run", *how, *guard)
    # An earlier task of the job has started it.
    return "" if "already" in unguarded else unguarded


class Guard:
    """Watches a job's processes on this node, until its end."""

    def __init__(self, job: str, name: str, memory_mib: int) -> None:
        unit = f"spr-{job}.slice"
        group = _ask("systemctl", "show", "--value", "--property=ControlGroup", unit).strip()
        if not group.endswith(f"/{unit}"):
            # A stopped unit has none; an empty name would mean the whole machine's.
            sys.exit(f"{unit} has no control group")
        # With cgroups version 1, systemd has its own hierarchy.
        base = Path("/sys/fs/cgroup")
        self.group = Path(f"{base / 'systemd' if (base / 'systemd').is_dir() else base}{group}")
        self._events = Path(f"{base}{group}/memory.events")
        self._memory = Path(f"{base}/memory{group}")
        self.report, self.limit = _JOBS / name / REPORT, memory_mib << 20
        # Half of a container's leaves the other half to all neighbors together.
        limits = [int(text) // 2 for text in map(_read, _NODES_MOST) if text.strip().isdigit()]
        self.most = min([MOST_PROCESSES, *limits])
        self._files: set[str] = set()
        self._is_over = False

    def run(self) -> None:
        """Look every moment, until the epilog stops this process; then remove the job's shared memory."""
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "_is_over", True))
        with suppress(OSError):
            self.report.unlink()
        while not self._is_over:
            pids = self.list_processes()
            if why := self.judge(pids):
                print(why, flush=True)
                with suppress(OSError):  # such as a full disk
                    self.report.write_text(why + "\n")
                self._kill()
                break
            time.sleep(_POLL_S)
        for name in self._files:
            with suppress(OSError):
                os.unlink(name)  # noqa: PTH108

    def list_processes(self) -> list[int]:
        """Return the job's processes on this node."""
        found: list[int] = []
        for file in _find(self.group, "cgroup.procs"):
            with suppress(OSError):
                found += map(int, file.read_text().split())
        return found

    def judge(self, pids: list[int]) -> str:
        """Return why the job has to end; "" if it keeps to its limits."""
        if len(pids) > self.most:
            return f"it had {len(pids)} processes, more than {self.most}"
        self._note_files(pids)
        used = _measure(pids, "status", _RSS, self._files)
        if used > self.limit:  # forked processes share memory, which only a slow look shows
            used = _measure(pids, "smaps_rollup", _PSS, self._files)
        # With version 1, the kernel counts the processes that it killed in their own group only.
        kills = [self._events, *_find(self._memory, "memory.oom_control")]
        if used <= self.limit and not any(_OOM_KILLS.search(_read(each)) for each in kills):
            return ""
        return (
            f"it used more than its {self.limit / (1 << 30):.1f} GiB of memory; "
            "--memory gives it more"
        )

    def _note_files(self, pids: list[int]) -> None:
        """Note what the job writes to /dev/shm: it stays there after its processes."""
        if not os.listdir(_SHM):  # noqa: PTH208
            return
        for pid in pids:
            with suppress(OSError):
                for entry in os.scandir(f"/proc/{pid}/fd"):
                    with suppress(OSError):
                        target = os.readlink(entry.path)  # noqa: PTH115
                        if target.startswith(_SHM) and not target.endswith(" (deleted)"):
                            self._files.add(target)

    def _kill(self) -> None:
        until = time.monotonic() + _KILL_S
        while (left := self.list_processes()) and time.monotonic() < until:
            for pid in left:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)


def _measure(pids: list[int], name: str, pattern: re.Pattern[str], files: set[str]) -> int:
    """Return the bytes that processes use: their own memory, and shared memory with its files."""
    kib = {"Anon": 0, "Shmem": 0}
    for pid in pids:
        for kind, number in pattern.findall(_read(Path(f"/proc/{pid}/{name}"))):
            kib[kind] += int(number)
    blocks = 0
    for file in files:
        with suppress(OSError):
            blocks += os.stat(file).st_blocks  # noqa: PTH116
    return 1024 * kib["Anon"] + max(1024 * kib["Shmem"], 512 * blocks)


def _find(folder: Path, name: str) -> list[Path]:
    """Return all files of a name. Unlike :meth:`Path.rglob`, this bears that folders vanish meanwhile."""
    return [Path(where, name) for where, _, files in os.walk(str(folder)) if name in files]


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(errors="replace")
    return ""


def _find_error(*argv: str) -> str:
    """Return the last line that a command printed about its failure; "" if it succeeded."""
    done = subprocess.run(
        argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=30, check=False
    )
    said = done.stdout.decode(errors="replace").strip().split("\n")[-1]
    return (said or f"{argv[0]} failed") if done.returncode else ""


def _ask(*argv: str) -> str:
    done = subprocess.run(argv, stdout=subprocess.PIPE, timeout=30, check=False)
    return done.stdout.decode(errors="replace")


if __name__ == "__main__":
    main()
