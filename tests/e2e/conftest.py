"""The embedded cloud of the end-to-end tests, and the clusters that their files share."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from infra.local.machines.podman import choose_runtime
from tests.harness.json_output import require_schema
from tests.harness.user_environment import build_wheel, make_environment, without_checkout

_DEADLINE_S = 900
_ROOT = Path(__file__).parents[2]


def heed_signals() -> None:
    """Heed Ctrl-C and a closed terminal even if the tests ignore them, as in the background."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Started(subprocess.Popen[str]):
    """A command that ends with its ``with`` block if the test fails there, or reaches its time limit."""

    def __exit__(self, kind: Any, *rest: Any) -> None:
        if kind:
            self.kill()
        super().__exit__(kind, *rest)


@dataclass(frozen=True)
class CommandLine:
    """``spr-cluster`` as a user runs it: a process of its own, with a home folder of its own."""

    home: Path
    programs: Path
    """The environment's programs, among them ``spr-cluster``."""
    cloud: Path | None = None
    """An embedded cloud that several homes share, as several laptops share an account."""

    @property
    def environment(self) -> dict[str, str]:
        folders = {"SPR_CLUSTER_HOME": str(self.home)}
        if self.cloud:
            folders["SPR_CLUSTER_LOCAL_CLOUD"] = str(self.cloud)
        # The server is as strict as AWS.
        strict = {"SPR_CLUSTER_LOCAL_APPLICATION": f"{_ROOT}:tests.cloud.application"}
        return {**without_checkout(), **folders, **strict}

    @property
    def argv(self) -> list[str]:
        return [str(self.programs / "spr-cluster")]

    def run(self, *arguments: str, check: int | None = 0) -> subprocess.CompletedProcess[str]:
        """Run a command; ``check`` is the exit code that it must have."""
        done = subprocess.run(
            [*self.argv, *arguments],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
        )
        if check is not None:
            assert done.returncode == check, (
                f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
            )
        if "--json" in arguments and done.stdout:
            require_schema(arguments, json.loads(done.stdout))
        return done

    def json(self, *arguments: str) -> Any:
        return json.loads(self.run(*arguments, "--json").stdout)

    def start(self, *arguments: str) -> Started:
        """Begin a command that the test will interrupt."""
        return Started(
            [*self.argv, *arguments],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=heed_signals,
        )

    def ssh(self, node: str, command: str, cluster: str = "spr") -> str:
        """Run a command on a node as `spr-cluster ssh` does, without the second that this asks EC2."""
        done = subprocess.run(
            ["ssh", "-F", str(self.home / cluster / "ssh_config"), node, command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
        )
        assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout


def podman(*arguments: str) -> str:
    argv = ["podman", *choose_runtime(), *arguments]
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout


@dataclass(frozen=True)
class LiveCluster:
    """A cluster that runs, with what ``up --json`` said of it."""

    cli: CommandLine
    up_result: dict[str, Any]
    interrupted: frozenset[str] = frozenset()
    """The machines that the killed ``up`` had bought."""
    continued: frozenset[str] = frozenset()
    """Those that the second one went on with; later tests may have had some replaced."""

    @property
    def names(self) -> list[str]:
        return [node["name"] for node in self.up_result["nodes"]]

    @property
    def hostnames(self) -> list[str]:
        addresses = [node["private_ip"] for node in self.up_result["nodes"]]
        return [f"ip-{address.replace('.', '-')}" for address in addresses]

    def container(self, node: str) -> str:
        """The name of a node's container."""
        (found,) = [found for found in self.up_result["nodes"] if found["name"] == node]
        names = podman("ps", "--format={{.Names}}").split()
        (name,) = [name for name in names if name.endswith(found["instance"])]
        return name

    def in_network(self, node: str, *command: str) -> None:
        """Run a program of this machine in a node's network."""
        pid = podman("inspect", "--format={{.State.Pid}}", self.container(node)).strip()
        argv = ["nsenter", f"--target={pid}", "--net", *command]
        subprocess.run(argv, capture_output=True, check=True, timeout=60)

    def wait_until_idle(self) -> None:
        """Wait until Slurm can use all nodes: their last job is over, and their daemons answer.

        A node that did not answer for SlurmdTimeout is down until it registers again, within a minute.
        """
        idle = f"{len(self.names)}idle"
        ask = "sinfo --noheader --format=%D%T"
        wait = f'for i in $(seq 500); do [ "$({ask})" = {idle} ] && break; sleep 0.2; done; {ask}'
        assert self.cli.ssh("node0", wait).split() == [idle]


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where ``spr-cluster`` is, installed as users install it."""
    folder = tmp_path_factory.mktemp("installed")
    return make_environment(build_wheel(folder / "wheel"), folder / "venv")


@pytest.fixture(scope="session")
def cli(
    programs: Path, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[CommandLine]:
    """The command line on the embedded cloud of all processes; the last removes it, its base image aside."""
    own = tmp_path_factory.getbasetemp()
    cloud = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "cloud"
    command_line = CommandLine(tmp_path_factory.mktemp("home"), programs, cloud)
    base = pytestconfig.getoption("--base")
    with cloud.with_suffix(".users").open("a") as users:
        fcntl.flock(users, fcntl.LOCK_SH)
        with alone(cloud):
            if not cloud.exists():
                command_line.run("local", "reset", "--keep-base", "--base", base)
                cloud.mkdir(mode=0o700, exist_ok=True)
        yield command_line
        with suppress(BlockingIOError):
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            command_line.run("local", "reset", "--keep-base", check=None)


@contextmanager
def alone(cloud: Path) -> Iterator[None]:
    """Keep the other processes of these tests waiting."""
    with cloud.with_suffix(".busy").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def kill_when(running: subprocess.Popen[str], text: str) -> None:
    """SIGKILL a command as soon as it prints a text."""
    with running:
        assert running.stdout is not None
        result = []
        for line in running.stdout:
            result.append(line)
            if text in line:
                running.kill()
                return
    raise AssertionError(f"{text!r} was never printed: {''.join(result)}")


@dataclass(frozen=True)
class Baked:
    """An image that all clusters of these tests start from, and how it was made."""

    ami: str
    cluster: str
    interrupted: list[str]
    """The machines that the killed ``bake`` had bought."""
    machines: list[str]
    """Those that the second one went on with."""


@pytest.fixture(scope="session")
def baked(cli: CommandLine) -> Baked:
    """The image, made by the first process that needs it."""
    assert cli.cloud
    record = cli.cloud / "baked.json"
    with alone(cli.cloud):
        if not record.exists():
            record.write_text(json.dumps(asdict(bake(cli))))
    return Baked(**json.loads(record.read_text()))


def bake(cli: CommandLine) -> Baked:
    """Make an image by a ``bake`` that is killed amid the installation, and by another."""
    kill_when(cli.start("bake", "--cloud", "local"), "Python packages")
    (begun,) = cli.json("list", "--cloud", "local")["clusters"]
    running = cli.start("bake", "--cloud", "local", "--json")
    text, _ = running.communicate(timeout=_DEADLINE_S)
    assert running.returncode == 0, text
    image = json.loads(text.splitlines()[-1])["image"]
    ids = list(dict.fromkeys(re.findall(r"Terminate: (i-[0-9a-f]+)", text)))
    return Baked(image, begun["cluster"], begun["resources"]["instances"], ids)


@pytest.fixture(scope="session")
def cluster(cli: CommandLine, baked: Baked) -> Iterator[LiveCluster]:
    """Three nodes of the spot market, made by an ``up`` that is killed when it has them, and by another."""
    kill_when(cli.start("up", "--nodes", "3", "--market", "spot", "--cloud", "local"), "bought:")
    bought = frozenset(cli.json("status")["resources"]["instances"])
    result = cli.json("up", "--nodes", "3")
    machines = frozenset(node["instance"] for node in result["nodes"])
    yield LiveCluster(cli, result, bought, machines)
    cli.run("down", "--name", "spr", "--yes", check=None)


TWO = ("--name", "two")


@pytest.fixture(scope="session")
def two(cli: CommandLine, baked: Baked) -> Iterator[LiveCluster]:
    """Two nodes, of the same image."""
    yield LiveCluster(cli, cli.json("up", *TWO, "--nodes", "2", "--cloud", "local"))
    cli.run("down", *TWO, "--yes", check=None)


def ssh_two(cluster: LiveCluster, node: str, command: str) -> str:
    return cluster.cli.ssh(node, command, TWO[1])


# It writes a checkpoint every other second.
DEMO_JOB = ("train", "squad", "--demo", "--epochs", "30", "--checkpoint-every", "7")


@dataclass(frozen=True)
class Trained:
    """A job that nothing disturbed: its results, its log, what `attach` printed, and where it ran."""

    job: str
    folder: Path
    log: str
    done: subprocess.CompletedProcess[str]
    hostnames: list[str]

    @property
    def results(self) -> Any:
        return json.loads((self.folder / "results.json").read_text())


@pytest.fixture(scope="session")
def trained(cluster: LiveCluster, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The job that others are compared with, which lose something on their way.

    The command that submits it is killed, and another laptop, which has only the key, follows it to its end.
    """
    folder = tmp_path_factory.mktemp("trained") / "a folder with 'quotes' and spaces"
    with cluster.cli.start(*DEMO_JOB, "--results", str(folder.with_name("killed"))) as running:
        assert running.stdout is not None
        found = (re.search(r"(squad-\d[\w-]+)$", line.strip()) for line in running.stdout)
        job = next(match[1] for match in found if match)
        next(line for line in running.stdout if "step " in line)
        running.kill()
    home = tmp_path_factory.mktemp("laptop")
    (home / "spr").mkdir()
    for key in (cluster.cli.home / "spr").glob("id_ed25519*"):
        shutil.copy2(key, home / "spr" / key.name)
    laptop = CommandLine(home, cluster.cli.programs, cloud=cluster.cli.cloud)
    here = ("--cloud", "local", "--name", "spr", "--results", str(folder))
    done = laptop.run("attach", job, *here)
    return Trained(job, folder, cluster.cli.run("logs", job).stdout, done, cluster.hostnames)
