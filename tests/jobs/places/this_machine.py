"""This machine as a cluster: real shell commands in its bash, a queue, mpirun, and ssh to folders."""

from __future__ import annotations

import atexit
import compileall
import functools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra.errors import ConnectionLostError, HostError
from jobs.places.files import worker_files
from jobs.places.launcher import JobEnd
from jobs.places.plan import JobPaths
from jobs.places.queue.slurm import SlurmLauncher
from jobs.worker.supervisor.launch import Launch
from provision.host import Result, TextSink
from tests.fakes import StandInHost, marked, run_here
from tests.jobs.context import job_spec
from tests.jobs.places import fake_slurm

NODES = ("node0", "node1", "node2")
# As on a node, but with a home that each node has for itself, names that only this process knows, less
# patience, and without low priority, which would let other tests of this machine delay these.
_PYTHON = """#!/bin/sh
exec {python} -c '
import dataclasses, os, runpy, socket, sys
from worker.supervisor import commands
commands.LOW_PRIORITY = "exec"
from worker.supervisor import deadline, head, launch, watcher
read = launch.parse_launch
launch.parse_launch = lambda text: dataclasses.replace(read(text), folder=os.getcwd())
socket.gethostbyname = dict.fromkeys({nodes}, "127.0.0.1").__getitem__
watcher.ERROR_GRACE_S, watcher.POLL_S, head._TRIES_S = 1.0, 0.05, 0.1
watcher.LEAVE_S, watcher.WAIT_S, watcher.NOTICES_S, deadline._LEAST_S = 2.0, 3.0, 0.5, 12.0
watcher.IDLE_S, watcher.GROW_S = 0.5, 1.0
from worker.supervisor import nodes
nodes._PAUSE_S = 0.1
_, module = sys.argv.pop(1), sys.argv.pop(1)
runpy.run_module(module, run_name="__main__")
' "$@"
"""
# Imported: unlike a script, a module is compiled only once.
_SLURM = f"""exec {{python}} -I -S -c '
import sys
sys.path.append("{Path(fake_slurm.__file__).parent}")
sys.argv[0] = "{{name}}"
import fake_slurm
sys.exit(fake_slurm.main())
' "$@"
"""
_HASTE = {
    "_READ_S, _ASK_S, _SOON_S = 0.05, 1.0, 0.2": "_READ_S, _ASK_S, _SOON_S = 0.05, 0.5, 0.1",
    "sleep 0.2": "sleep 0.05",
    "sleep 1\n": "sleep 0.1\n",
    "sleep 1;": "sleep 0.5;",
    "sleep 8\n": "sleep 0.3\n",
}
"""Less patience for commands on the head."""
_MPIRUN = """#!/bin/bash
"$(dirname "$0")/mpiexec.hydra" "$@"
exit $?
"""
# Each node is a folder; one that is not there does not answer, and one with `hangs` never ends.
_SSH = """#!/bin/bash
while [ "${{1#-}}" != "$1" ]; do
  case $1 in -n) exec < /dev/null ;; -o) shift ;; esac
  shift
done
node={nodes}/$1 here=$HOME; shift
[ -d "$node" ] || exit 255
[ ! -e "$node/hangs" ] || exec sleep 60
env -u SLURM_JOB_ID -u SLURM_STEP_ID HOME="$node" bash -c "${{*//$here/$node}}" <&0 &
# What runs there ends with the connection.
trap 'pkill -P $!; kill $!' TERM
wait $!
"""
# Starts the program once, as a step of the job, passes SIGTERM to it, and waits.
_HYDRA = """#!/bin/bash
while :; do
  case $1 in
    -genv | -env) export "$2=$3"; shift 3 ;;
    -wdir) cd "$2" || exit; shift 2 ;;
    -bootstrap | -ppn | -n) shift 2 ;;
    *) break ;;
  esac
done
export SLURM_STEP_ID=0
trap 'kill -TERM $rank' TERM
setsid "$@" &
rank=$!
wait $rank; code=$?
while kill -0 $rank 2>/dev/null; do wait $rank; code=$?; done
exit $code
"""


@dataclass
class ThisMachine(StandInHost):
    """The head of a cluster: a host whose commands run here, with a separate home folder."""

    root: Path
    name: str = "node0"
    drop_after: list[int] = field(default_factory=list)
    """The number of lines after which the next followed commands lose the connection."""
    refuse: HostError | None = None
    """What followed commands meet instead of the machine."""
    gone: str = ""
    requeue_s: float = 0.3
    """How long a job waits that is to run again; Slurm takes two minutes by default."""

    @property
    def home(self) -> Path:
        return self.root / "node0"

    @property
    def bin(self) -> Path:
        return self.root / "bin"

    @property
    def slurm(self) -> Path:
        return self.root / "slurm"

    @property
    def environ(self) -> dict[str, str]:
        path = f"{self.bin}:{os.environ['PATH']}"
        slurm = {"FAKE_SLURM": str(self.slurm), "FAKE_REQUEUE_S": str(self.requeue_s)}
        return {"HOME": str(self.home), "PATH": path, **slurm}

    def run(
        self,
        command: str,
        *,
        timeout_s: float | None = 120,
        check: bool = True,
        on_text: TextSink | None = None,
    ) -> Result:
        for patient, hasty in _HASTE.items():
            command = command.replace(patient, hasty)
        if on_text:
            return self._run_followed(command, on_text)
        return super().run(command, timeout_s=timeout_s, check=check)

    def answer(self, command: str, timeout_s: float | None) -> Result:
        try:
            return run_here(command, self.environ, timeout_s)
        except subprocess.TimeoutExpired:
            raise HostError(self.name, f"did not finish within {timeout_s} s") from None

    def _run_followed(self, command: str, on_text: TextSink) -> Result:
        if self.refuse:
            raise self.refuse
        limit = self.drop_after.pop(0) if self.drop_after else None
        lines = []
        with subprocess.Popen(
            ["bash", "-c", command],
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line)
                on_text(line.rstrip("\n"))
                if limit is not None and len(lines) == limit:
                    # Nothing on the machine is killed by that.
                    process.stdout.close()
                    raise ConnectionLostError(self.name, "the connection broke")
        return Result(process.returncode, "".join(lines), "")

    def put(self, content: bytes, path: str, mode: int = 0o600) -> None:
        Path(path).write_bytes(content)
        Path(path).chmod(mode)

    def download(self, command: str) -> Iterator[bytes]:
        argv = ["bash", "-c", command]
        done = subprocess.run(argv, env=self.environ, stdout=subprocess.PIPE)
        yield from (done.stdout[at : at + 1000] for at in range(0, len(done.stdout), 1000))
        if done.returncode:
            raise HostError(self.name, f"ended with {done.returncode}")

    def why_gone(self) -> str:
        return self.gone

    # The cluster

    def install(self) -> None:
        """Install Slurm, Python, and mpirun."""
        for folder in (self.home, self.bin, self.slurm):
            folder.mkdir()
        self.connect()
        content = {"jobs": {}, "nodes": dict.fromkeys(NODES, True)}
        (self.slurm / "queue").write_text(json.dumps(content))
        for name in fake_slurm.COMMANDS:
            self.write_program(name, _SLURM.format(python=sys.executable, name=name))
        python = _PYTHON.format(python=sys.executable, nodes=json.dumps(NODES))
        self.write_program("python", python)
        self.write_program("ssh", _SSH.format(nodes=self.root))
        self.write_program("mpirun", _MPIRUN)
        self.write_program("mpiexec.hydra", _HYDRA)

    def connect(self, *workers: str) -> Path:
        """Let ssh enter workers; returns the home folder of the last one."""
        (self.home / "hosts").write_text("".join(f"{name}\n" for name in ("node0", *workers)))
        for name in workers:
            (self.root / name).mkdir()
        return self.root / (workers or ("node0",))[-1]

    def write_program(self, name: str, text: str) -> Path:
        """Put a program on the machine's PATH; returns it."""
        path = self.bin / name
        path.write_text(text if text.startswith("#!") else f"#!/bin/sh\n{text}")
        path.chmod(0o755)
        return path

    def slurm_command(self, *argv: str) -> str:
        """Run a command of Slurm, such as ``scontrol``, and return its output."""
        return self.run(shlex.join(argv)).stdout

    def jobs_in_queue(self) -> list[tuple[str, str]]:
        """The names and states of the jobs in the queue."""
        jobs = json.loads((self.slurm / "queue").read_text())["jobs"].values()
        return [(job["name"], job["state"]) for job in jobs if job["state"] in fake_slurm.ACTIVE]

    def end(self) -> None:
        """Kill every process that the queue has started. Fails if that is impossible."""
        for _ in range(200):
            left = self.processes()
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not left:
                return
            time.sleep(0.02)
        raise AssertionError(f"processes are left: {left}")

    def processes(self, **variables: str) -> list[int]:
        """The processes of this machine that have these environment variables."""
        wanted = {"FAKE_SLURM": str(self.slurm), **variables}
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                environ = path.read_bytes().split(b"\0")
                if all(f"{name}={value}".encode() in environ for name, value in wanted.items()):
                    found.append(int(path.parent.name))
        return found


@functools.cache
def _compiled_code() -> Path:
    """The worker code with its bytecode, which each job of a new folder would have to compile."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    for name, source in worker_files().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, folder / name)
    for part in ("supervisor", "runtime", "storage"):
        compileall.compile_dir(folder / "code/worker" / part, quiet=1)
    return folder / "code"


def follow(head: ThisMachine, paths: JobPaths) -> tuple[JobEnd, list[str], list[str]]:
    """Follow a job; returns its end, the lines of its log, and the reasons for its waits."""
    lines, reasons = list[str](), list[str]()
    end = SlurmLauncher(head).follow(paths, lines.append, reasons.append)
    return end, lines, reasons


def submit(
    head: ThisMachine,
    script: str,
    job_id: str = "squad-1",
    *,
    nodes: int = 1,
    least: int = 0,
    **more: Any,
) -> JobPaths:
    """Submit a job whose only rank runs a bash script; ``more`` is more of its launch."""
    paths = JobPaths(job_id, home=str(head.home))
    if not Path(paths.code).exists():
        for node in head.root.glob("node*"):
            folder = node / paths.relative_root
            shutil.copytree(_compiled_code(), folder / "code")
            (folder / "output").mkdir(exist_ok=True)
    again = shlex.join(more.pop("again", ()))
    first = f'[ "$0" != --resume ] || exec {again}; ' if again else ""
    script = marked(first + script, paths.root)
    values: dict[str, Any] = {
        "resumes": bool(again),
        "folder": paths.root,
        "head": "node0",
        "mpirun": str(head.bin / "mpirun"),
        "program": ("bash", "-c", script),
        "nproc_per_node": 1,
        "env": {"GREETING": "it's me"},
        "pinning": dict.fromkeys(NODES, ()),
        "omp_threads": 1,
        "ccl": False,
        "exports": {},
        "planned_nodes": nodes,
    }
    values |= {name: more.pop(name) for name in values.keys() & more.keys()}
    variables = more.pop("variables", ())
    values["spec"] = job_spec(least_nodes=least, **more)
    SlurmLauncher(head).submit(Launch(**values), paths, variables)
    return paths


def wait_for(true: Callable[[], bool], seconds: float = 55) -> None:
    """Return as soon as something is true."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def read_soon(path: Path, seconds: float = 55) -> str:
    """Return a file's text as soon as there is some."""
    wait_for(lambda: path.exists() and bool(path.read_text()), seconds)
    return path.read_text()


def is_gone(pid: int) -> bool:
    """Whether a process has ended, or is about to."""
    state = Path(f"/proc/{pid}/stat")
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"
