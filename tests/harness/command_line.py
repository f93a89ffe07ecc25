"""The command line in this process, with a cloud called AWS: EC2 and the machines are simulated.

What a user sees is what counts here: `main` itself runs, with its output, exit code and every call
that reaches the cloud written down.
"""

from __future__ import annotations

import contextlib
import functools
import io
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.parse import parse_qs

import pytest

from cluster.cli.chosen_cluster import open_cloud
from cluster.context import Context
from cluster.local_files import home
from infra.aws.clients import Clients, connect
from infra.aws.cloud import DEFAULT_REGION, Cloud, open_aws_cloud
from infra.errors import HostError
from infra.local.api.requests import READS, Reply, read_call
from jobs.__main__ import main
from jobs.cli import COMMANDS
from provision.host import Login, Result
from provision.ssh import SshHost
from tests.fakes import marked
from tests.harness.cloud import make_cloud
from tests.harness.prepared_cluster import begin_with
from tests.harness.simulated_cloud import SimulatedCloud, let_no_time_pass, open_simulated_cloud
from tests.harness.simulated_machines import SimulatedHost
from tests.infra.local.fakes import Endpoint, leave_moto_as_it_was

# Commands are imported lazily. Import them all now, so that none can import a replaced name for good.
for _command in COMMANDS.values():
    import_module(_command.module)

# What a machine does instead of a command; its argument receives the lines of output.
Act = Callable[[Any], Result]


@dataclass(frozen=True)
class CommandResult:
    """A command's exit code and output."""

    code: int
    out: str
    err: str

    @property
    def message(self) -> str:
        """The error as the user reads it: from the last ``spr-cluster:`` on, without that word."""
        _, found, text = f"\n{self.err}".rpartition("\nspr-cluster: ")
        return text.rstrip("\n") if found else self.err.rstrip("\n")


@dataclass(frozen=True)
class ApiCall:
    """One call to the cloud: its action as IAM names it, its parameters, and its region."""

    action: str
    parameters: dict[str, str]
    region: str

    @property
    def changes(self) -> bool:
        return not self.action.partition(":")[2].startswith(READS)


class ApiCallLog:
    """Records every call to the cloud before it takes effect."""

    def __init__(self, answer: Callable[[dict[str, Any]], Any]) -> None:
        self._answer = answer
        self.calls: list[ApiCall] = []
        self.before: list[Callable[[ApiCall], None]] = []
        self.instead: Reply | None = None
        """The answer to every call, such as a network's login page."""

    def __call__(self, environ: dict[str, Any]) -> Any:
        call = read_call(environ)
        seen = ApiCall(f"{call.service}:{call.action}", _parameters(call.body), call.region)
        self.calls.append(seen)
        for tell in self.before:
            tell(seen)
        return self.instead or self._answer(environ)


def _parameters(body: bytes) -> dict[str, str]:
    form = parse_qs(body.decode("utf-8", "replace"))
    return {key: values[0] for key, values in form.items()}


@dataclass
class StagedMachines:
    """Opens simulated machines; ``staged`` holds the commands that some of them answer differently."""

    cloud: SimulatedCloud
    staged: list[tuple[str, str, Act]] = field(default_factory=list)

    def open(self, name: str, address: str, login: Login, *, alias: str, **more: Any) -> StagedHost:
        node: Any = SimpleNamespace(
            name=name, instance=SimpleNamespace(id=alias), jump=more["proxy"]
        )
        files: Any = SimpleNamespace(known_hosts=login.known_hosts)
        return StagedHost(self, node, files)


class StagedHost(SimulatedHost):
    """A simulated machine that answers some commands as a test says."""

    def __init__(self, machines: StagedMachines, node: Any, files: Any) -> None:
        super().__init__(machines.cloud.machines, node, files)
        self._stage = machines

    def run(self, command: str, **options: Any) -> Result:
        for node, pattern, answer in self._stage.staged:
            if re.fullmatch(node, self.name) and re.search(pattern, command):
                return answer(_marking(command, options.get("on_text")))
        return super().run(command, **options)

    def download(self, command: str) -> Iterator[bytes]:
        raise HostError(self.name, "the connection was lost")


def _marking(command: str, on_text: Any) -> Any:
    return on_text and (lambda text: on_text(marked(text, command)))


@dataclass(repr=False)
class CommandLine:
    """`spr-cluster` with everything behind it."""

    cloud: SimulatedCloud
    call_log: ApiCallLog
    machines: StagedMachines
    url: str = ""
    """The address of AWS, if it is not this cloud."""
    clients: dict[tuple[str, str], Clients] = field(default_factory=dict)
    """All clients so far, by address and region."""
    ssh_calls: list[list[str]] = field(default_factory=list)
    """OpenSSH's command lines."""
    ssh_code: Callable[[], int] = lambda: 0
    """OpenSSH's exit code."""

    def run(self, *argv: str) -> CommandResult:
        """Run a command until it ends. Exceptions of bugs are not caught."""
        out, err = io.StringIO(), io.StringIO()
        for clients in self.clients.values():
            # Each command asks once who calls.
            vars(clients).pop("caller", None)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = main(argv)
            except SystemExit as end:
                code = int(end.code or 0)
        return CommandResult(code, out.getvalue(), err.getvalue())

    def must(self, *argv: str) -> CommandResult:
        """Run a command that must succeed."""
        result = self.run(*argv)
        assert result.code == 0, result.err
        return result

    def begin(self, *options: str) -> CommandResult:
        """Run `up`, in an empty cloud, once for all tests of this process."""
        assert (self.call_log.calls, self.machines.staged) == ([], []), "a test begins with this"
        argv = ("up", "--yes", *options)
        result: CommandResult = begin_with(self.cloud, " ".join(argv), lambda: self.must(*argv))
        return result

    def stage(self, node: str, pattern: str, answer: Result | Exception | Act) -> None:
        """Have nodes with matching names answer matching commands differently."""

        def act(on_text: Any) -> Result:
            if isinstance(answer, Exception):
                raise answer
            if not isinstance(answer, Result):
                return answer(on_text)
            for line in answer.stdout.splitlines() if on_text else ():
                on_text(line)
            return answer

        self.machines.staged.append((node, pattern, act))

    @property
    def changes(self) -> Counter[str]:
        """The calls so far that change something."""
        return Counter(seen.action for seen in self.call_log.calls if seen.changes)

    def ids(self, *states: str) -> list[str]:
        """The machines in these states, oldest first."""
        found = self.cloud.fake.backend.all_instances()
        return [i.id for i in found if i.state in (states or ("running",))]

    def lose(self, instance_id: str) -> None:
        """Terminate a machine, as if it had failed."""
        with self.cloud.fake.application.lock:
            self.cloud.fake.backend.terminate_instances([instance_id])

    def open_cloud(self, name: str, region: str | None, _: object) -> Cloud:
        """In place of :func:`cluster.cli.chosen_cluster.open_cloud`: the same choice, at this address."""
        here = make_cloud(self.cloud.fake.endpoint.url)
        if name == "local":
            return replace(here, region=region or DEFAULT_REGION)
        cloud = open_aws_cloud(region)
        with self.cloud.fake.application.lock, contextlib.suppress(KeyError):
            self.cloud.fake.application.open_region(cloud.region)
        return replace(
            cloud,
            caller_cidr=self.cloud.network.caller_cidr,
            probe_ssh=self.cloud.network.probe_ssh,
            endpoint_url=self.url or here.endpoint_url,
            credentials=here.credentials,
        )


def files_at_home(*, event_logs: bool = False) -> list[str]:
    """The tool's files on this machine, without locks, prices and, by default, event logs."""
    found = (path for path in home().rglob("*") if path.is_file())
    omitted = (".lock",) if event_logs else (".lock", "events.jsonl")
    kept = (p for p in found if not p.name.endswith(omitted) and not p.name.startswith("prices-"))
    return sorted(str(p.relative_to(home())) for p in kept)


@contextlib.contextmanager
def open_command_line(
    endpoint: Endpoint, root: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[CommandLine]:
    """Open a command line on an empty cloud whose time passes only in sleeps."""
    leave_moto_as_it_was(monkeypatch)
    # A fixture of a whole module runs before those of each test.
    monkeypatch.setenv("AWS_REGION", DEFAULT_REGION)
    handlers = [(number, signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGHUP)]
    with open_simulated_cloud(endpoint, root, time.time()) as simulated_cloud:
        let_no_time_pass(simulated_cloud.clock, monkeypatch)
        server = simulated_cloud.fake.application
        call_log = ApiCallLog(server._answer_call)
        monkeypatch.setattr(server, "_answer_call", call_log)
        line = CommandLine(simulated_cloud, call_log, StagedMachines(simulated_cloud))
        _put_in_place(line, monkeypatch)
        try:
            yield line
        finally:
            for number, handler in handlers:
                signal.signal(number, handler)


def _put_in_place(line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, endpoint = line.cloud.clock, line.cloud.fake.endpoint

    # A set of clients takes a third of a second to make.
    made = line.clients
    made[endpoint.url, DEFAULT_REGION] = endpoint.clients

    def connect_once(cloud: Cloud) -> Clients:
        place = (str(cloud.endpoint_url), cloud.region)
        if place not in made:
            made[place] = connect(cloud)
        return made[place]

    def run_client(argv: list[str]) -> int:
        line.ssh_calls.append(argv)
        return line.ssh_code()

    def now() -> datetime:
        return datetime.fromtimestamp(clock.now, timezone.utc)

    monkeypatch.setattr("cluster.cli.ssh.run_client", run_client)
    replace_everywhere(monkeypatch, open_cloud, lambda *args, **_: line.open_cloud(*args))
    replace_everywhere(monkeypatch, connect, connect_once)
    replace_everywhere(monkeypatch, SshHost, line.machines.open)
    context = functools.partial(Context, clock=clock, now=now)
    replace_everywhere(monkeypatch, Context, context)


def replace_everywhere(monkeypatch: pytest.MonkeyPatch, original: object, stand_in: object) -> None:
    """Replace a function or class in every product module that has imported it."""
    for module, key in _find_imports(original, len(sys.modules)):
        monkeypatch.setattr(module, key, stand_in)


@functools.cache
def _find_imports(original: object, _modules: int) -> list[tuple[ModuleType, str]]:
    """Return where product modules have it; a look through all names of all modules takes a while."""
    return [
        (module, key)
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in ("infra", "provision", "cluster", "jobs")
        for key, value in list(vars(module).items())
        if value is original
    ]
