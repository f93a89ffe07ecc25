"""Run something on nodes: one of our programs on one machine or all, or any function for many.

A program is a module with ``main``. It is sent over standard input with the modules that it imports; nothing
is installed. They use only the standard library and each other, and Python 3.8 or newer.
"""

from __future__ import annotations

import inspect
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import resolve_name
from types import ModuleType
from typing import Generic, Protocol, TypeVar

from infra.errors import HostError, HostKeyError, HostsError, SprError
from provision.host import Host
from provision.install import VENV
from provision.on_node import everywhere

_START = """import json,sys,types
for name,text in json.loads(sys.stdin.readline()):
 module=sys.modules[name]=types.ModuleType(name);module.__package__=name.rpartition(".")[0]
 exec(compile(text,name,"exec"),module.__dict__)
module.main()"""
SYSTEM_PYTHON = ("python3", "-I", "-S", "-c", _START)
"""The system's Python, isolated from the user's environment: it starts in 10 ms."""
_FIND = f'p={VENV}/bin/python; [ -x $p ] || p=python3; exec $p -I -c "$@"'
STACK_PYTHON = ("sh", "-c", _FIND, "sh", _START)
"""The Python of the node's stack with its packages, or else the system's. It too is isolated: a user's
~/email.py must not stand in for Python's own module."""
_END = "_END_OF_THE_PROGRAM_"
_NO_SSH = 255
# Measured on 256 hosts: beyond about 64 simultaneous logins, cryptography is the bottleneck.
FAN_OUT = 64


class Named(Protocol):
    """Anything with the name of a machine."""

    @property
    def name(self) -> str: ...


T = TypeVar("T")
N = TypeVar("N", bound=Named)


@dataclass(frozen=True)
class Program:
    """A program for a node: its command's words, and the standard input that contains its source."""

    argv: tuple[str, ...]
    stdin: str

    @property
    def command(self) -> str:
        """The shell command that waits for the standard input."""
        return f"exec {shlex.join(self.argv)}"

    def render(self, title: str, node: str = "") -> str:
        """Return the shell command that runs it here or on another ``node``."""
        run = shlex.join(self.argv)
        there = f"ssh {node} {shlex.quote(run)}" if node else run
        return f"# {title}\n{there} <<'{_END}'\n{self.stdin}{_END}"


def send(
    program: ModuleType,
    *arguments: str,
    lines: Iterable[str] = (),
    python: tuple[str, ...] = SYSTEM_PYTHON,
) -> Program:
    """Return a program with its arguments and the ``lines`` for its standard input."""
    sources: dict[str, str] = {}
    _collect(program, sources)
    text = "".join(f"{line}\n" for line in (json.dumps([*sources.items()]), *lines))
    return Program((*python, *arguments), text)


def _collect(module: ModuleType, sources: dict[str, str]) -> None:
    """Add a module after our modules that it imports."""
    source = inspect.getsource(module)
    # Not by `ast`: in Python 3.11, its parser fails at random if several threads use it.
    for imported in re.findall(r"^from (\S+) import ", source, re.MULTILINE):
        name = resolve_name(imported, module.__package__)
        if name.partition(".")[0] not in sys.stdlib_module_names:
            _collect(sys.modules[name], sources)
    sources.setdefault(module.__name__, source)


@dataclass(frozen=True)
class Answer(Generic[T]):
    """One node's answer; ``reason`` says why there is no ``value``.

    ``began`` and ``ended`` are seconds since 1970 by the head's clock, if the head ran the program.
    """

    node: str
    reached: bool
    value: T | None = None
    reason: str = ""
    began: float = 0.0
    ended: float = 0.0
    error: SprError | None = None

    @property
    def problem(self) -> str:
        """Why the head can't use the node; "" if it can."""
        if not self.reached:
            return f"the head can't connect over SSH: {self.reason}"
        return "" if self.value else f"the probe failed: {self.reason}"


def query(
    host: Host, what: str, program: Program, parse: Callable[[str], T], limit_s: float = 120
) -> T:
    """Run a program on a machine and parse its output. Raises :class:`HostError`."""
    said = host.run(program.render(f"querying the {what}"), timeout_s=limit_s).stdout
    try:
        return parse(said)
    except ValueError as error:
        raise HostError(host.name, f"its {what} can't be read: {error}") from None


def query_all(
    head: Host, what: str, program: Program, parse: Callable[[str], T], limit_s: float
) -> dict[str, Answer[T]]:
    """Have the head run a program on all nodes of its hostfile, over the SSH path that jobs use.

    A node that does not answer within ``limit_s`` seconds gets a reason instead of a value.
    """
    plan = {"argv": program.argv, "stdin": program.stdin, "limit_s": limit_s}
    asking = send(everywhere, lines=[json.dumps(plan)]).render(f"querying the {what} of all nodes")
    rows = head.run(asking, timeout_s=5 * limit_s).stdout.splitlines()
    answers = [_read(row, parse, limit_s) for row in rows if row.startswith('{"node"')]
    return {answer.node: answer for answer in answers}


def _read(row: str, parse: Callable[[str], T], limit_s: float) -> Answer[T]:
    """Parse a row of :mod:`provision.on_node.everywhere`."""
    said = json.loads(row)
    node, code, text = said["node"], said["code"], said["text"]
    if code is None:
        return Answer(node, False, reason=f"no answer within {limit_s:g} s")
    if code == _NO_SSH:
        return Answer(node, False, reason=text or "ssh gave no reason")
    try:
        return Answer(node, True, parse(text), "", said["began"], said["ended"])
    except ValueError:
        return Answer(node, True, reason=text or f"exit code {code}")


def on_each(hosts: Iterable[N], work: Callable[[N], T]) -> dict[str, Answer[T]]:
    """Run a function for many machines in parallel; return the outcomes by machine name.

    A :class:`HostKeyError` is raised as it is: it outweighs other failures.
    """
    targets = tuple(hosts)
    wrong_key: HostKeyError | None = None
    answers: dict[str, Answer[T]] = {}
    pool = ThreadPoolExecutor(max(1, min(FAN_OUT, len(targets))))
    try:
        futures = {host.name: pool.submit(work, host) for host in targets}
        for name, future in futures.items():
            try:
                answers[name] = Answer(name, True, future.result())
            except HostKeyError as error:
                wrong_key = wrong_key or error
            except SprError as error:
                reason = error.message.removeprefix(f"[{name}] ")
                answers[name] = Answer(name, False, reason=reason, error=error)
    finally:
        # Ctrl-C must not wait for machines that take twenty minutes to answer.
        pool.shutdown(wait=False, cancel_futures=True)
    if wrong_key:
        raise wrong_key
    return answers


def on_all(
    what: str, hosts: Iterable[N], work: Callable[[N], T], *, hint: str | None = None
) -> dict[str, T]:
    """Run a function for many machines in parallel; return the results by machine name.

    Raises :class:`HostsError` with every failed machine's outcome, and with ``hint`` or else the
    first machine's hint.
    """
    answers = on_each(hosts, work)
    failed = {name: answer for name, answer in answers.items() if answer.error}
    if failed:
        hints = (answer.error.hint for answer in failed.values() if answer.error)
        raise HostsError(
            f"{what} failed on {len(failed)} of {len(answers)} nodes",
            {name: answer.reason for name, answer in failed.items()},
            hint=hint or next(filter(None, hints), None),
        )
    return {name: answer.value for name, answer in answers.items()}  # type: ignore[misc]
