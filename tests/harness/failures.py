"""Failures on a :class:`CommandLine`'s cloud and machines, and checks of their messages."""

from __future__ import annotations

import re
import shlex
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from cluster.local_files import ClusterFiles, home
from infra.local.api.requests import Reply
from provision.host import Result
from provision.host_keys import pin_host_keys
from tests.harness.command_line import CommandLine, files_at_home, open_command_line
from tests.harness.simulated_machines import host_key_of
from tests.infra.local.fakes import Endpoint

# Word for word, or a pattern where Python's own words differ between its versions.
Message = str | re.Pattern[str]
# Prepares a fault.
Act = Callable[[CommandLine], None]

# How a message names the cluster once this machine knows where it is.
FLAGS = "--name spr"
EVENTS_HINT = "\n  → spr-cluster events --name spr shows what was done and why"
# What there is when the groups are made, when the first machine has failed, and when a worker has.
GROUPS = "1 security group, 1 placement group, 1 key pair"
HEAD = f"1 instance, 1 volume, 1 interface, {GROUPS}"
HEAD_AND_IMAGE = f"{HEAD}, 1 image, 1 snapshot"
BOTH = f"2 instances, 2 volumes, 2 interfaces, {GROUPS}, 1 image, 1 snapshot"


def nothing(_: CommandLine) -> None:
    """No fault."""


@dataclass(frozen=True)
class Row:
    """A command and a fault; ``left`` is what the message counts where `up` has begun."""

    name: str
    argv: str
    faults: str = ""
    act: Act = nothing
    left: str = ""
    code: int = 1
    breaks_contract: str = ""
    """What is not as AWS's service model says, on purpose."""


def rows(*tables: tuple[Row, ...]) -> pytest.MarkDecorator:
    """A test for each row."""
    params = []
    for row in chain(*tables):
        marks = [pytest.mark.breaks_contract(row.breaks_contract)] if row.breaks_contract else []
        params.append(pytest.param(row, id=row.name, marks=marks))
    return pytest.mark.parametrize("row", params)


def error(action: str, code: str, message: str = "told by EC2", times: int = 10_000) -> str:
    """The faults file by which calls fail."""
    rule = f"action = '{action}'\ncode = '{code}'\nmessage = '{message}'\ntimes = {times}\n"
    return f"[[error]]\n{rule}"


def machines(fate: str, *numbers: int) -> str:
    """The faults file by which all machines, or some, have a fate."""
    rules = [f"n = {number}\n" for number in numbers] or [""]
    return "".join(f"[[machine]]\n{rule}fate = '{fate}'\n" for rule in rules)


def stage(node: str, pattern: str, answer: Any) -> Act:
    """Nodes answer a command so, instead of the truth."""
    return lambda line: line.stage(node, pattern, answer)


def all_of(*acts: Act) -> Act:
    """More than one fault."""

    def prepare(line: CommandLine) -> None:
        for act in acts:
            act(line)

    return prepare


def begin(line: CommandLine) -> None:
    """A cluster that is whole."""
    line.begin("--nodes", "2")


def backend(line: CommandLine) -> Any:
    return line.cloud.fake.backend


def _record(line: CommandLine) -> dict[str, str]:
    """The tags of the cluster's group."""
    groups = [g for groups in backend(line).groups.values() for g in groups.values()]
    group = next(group for group in groups if group.name != "default")
    found: dict[str, str] = backend(line).tags[group.id]
    return found


def record(keys: str, value: str) -> Act:
    """Change tags of the cluster's record."""
    changed = {f"spr-cluster:{key}": value for key in keys.split()}
    return lambda line: _record(line).update(changed)


def lose_record(line: CommandLine) -> None:
    tags = _record(line)
    for key in tags.keys() - {"spr-cluster:cluster"}:
        del tags[key]


def stop_head(line: CommandLine) -> None:
    backend(line).stop_instances([line.ids()[0]])


def pin_wrong_key(number: int) -> Act:
    """Pin a wrong host key, as an attacker on the network would at first contact."""

    def prepare(line: CommandLine) -> None:
        def hello(_: Any) -> Result:
            files = ClusterFiles.of("spr")
            pin_host_keys(files.known_hosts, line.ids()[number], [host_key_of("somebody")])
            return Result(0, "", "")

        line.stage(f"node{number}", "^true$", hello)

    return prepare


def fail_images(line: CommandLine) -> None:
    def fail(_: object) -> None:
        for image in backend(line).amis.values():
            if image.owner_id == backend(line).account_id:
                image.state = "failed"

    line.call_log.before.append(fail)


def remove_default_vpc(line: CommandLine) -> None:
    for subnets in list(backend(line).subnets.values()):
        for subnet_id in list(subnets):
            backend(line).delete_subnet(subnet_id)


def show_login_page(line: CommandLine) -> None:
    page = b"<!doctype html><title>Welcome to our hotel</title>"
    line.call_log.instead = Reply("200 OK", (("Content-Type", "text/html"),), page)


def be_unreachable(line: CommandLine) -> None:
    line.url = "http://127.0.0.1:9"


def hurry(line: CommandLine) -> None:
    line.cloud.clock.pace = 20


def lose_key(_: CommandLine) -> None:
    ClusterFiles.of("spr").key.unlink()


def open_key(_: CommandLine) -> None:
    ClusterFiles.of("spr").key.chmod(0o644)


def damage_key(_: CommandLine) -> None:
    ClusterFiles.of("spr").key.write_text("-----BEGIN OPENSSH PRIVATE KEY-----\n")


def plain(text: str) -> str:
    """Replace the parts of a message that differ in every run: IDs, fingerprints, paths, times."""
    text = re.sub(r"\b(i|ami|sg|snap|vol|eni|sir|subnet|vpc|key)-[0-9a-f]{17}\b", r"\1-0", text)
    text = re.sub(r"\bSHA256:[\w+/]{43}", "SHA256:0", text)
    text = re.sub(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", "TIME", text)
    # The limit of a boot, less a machine's age: pretended time passes faster for several threads.
    text = re.sub(r"\b(?:3\d|40) min\b", "40 min", text)
    text = re.sub(r"(\w{3} \d+ at )?\d\d:\d\d UTC \(in [\w ]+\)", "TIME", text)
    return text.replace(str(home()), "HOME")


@contextmanager
def one_for_all(endpoint: Endpoint) -> Iterator[CommandLine]:
    """A command line for many tests, none of which changes anything."""
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory() as folder,
        open_command_line(endpoint, Path(folder), patch) as line,
    ):
        yield line


def refuse(line: CommandLine, argv: Sequence[str]) -> str:
    """Make a mistake that changes nothing, in EC2 and on this machine; return its one message."""
    before = line.changes

    result = line.run(*argv)

    assert result.code == 2, result.err
    assert result.err.count("spr-cluster: ") == 1
    assert result.out == ""
    assert line.changes == before
    assert files_at_home(event_logs=True) == []
    return result.message


def expect_refusal(line: CommandLine, argv: Sequence[str], message: Message) -> None:
    """Check that a mistake gives this message and changes nothing."""
    found = refuse(line, argv)
    if isinstance(message, str):
        assert found == message, found
    else:
        assert message.fullmatch(found), found


_DID_NOT = (
    "\n`up` did not finish.\n"
    f"To continue:           spr-cluster up {FLAGS}\n"
    f"To remove what exists: spr-cluster down {FLAGS}\n"
)


def expect_failed_up(line: CommandLine, row: Row) -> str:
    """Check that `up` names all that is left, and how to remove it; return the message."""
    row.act(line)
    line.cloud.faults(row.faults)

    result = line.run(*shlex.split(row.argv))

    assert result.code == row.code, result.err
    message = plain(result.message)
    assert message.endswith(EVENTS_HINT), message
    assert "Traceback" not in result.err
    assert _DID_NOT in result.err, result.err
    kinds, ids, costs = _what_it_lists(result.err)
    assert kinds == row.left, kinds
    assert ids == set(line.cloud.left())
    assert costs == ("instance" in row.left)
    return message.removesuffix(EVENTS_HINT)


def _what_it_lists(text: str) -> tuple[str, set[str], bool]:
    """Return what a failed `up` lists: counts by kind, IDs, and whether it costs money."""
    listed = re.search(r"^It exists now( and costs money)?: (.*)$", text, re.MULTILINE)
    if not listed:
        assert "EC2 shows nothing of it now." in text
        return "", set(), False
    ids = {id_ for group in re.findall(r"\(([^)]*)\)", listed[2]) for id_ in group.split(", ")}
    kinds = re.sub(r" \([^)]*\)", "", listed[2]).replace("; ", ", ")
    return kinds, ids, bool(listed[1])
