"""Any input has an exit code, and one clear message for every failure; never a traceback.

The command lines are made from the real parser: every option of every command, with values that are
right, nearly right, or nonsense. They run against a cloud where one may only look, or against none.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cluster.console.options import Option
from cluster.console.parser import Parser
from infra.iam.policy import build_policy
from jobs.cli import COMMANDS, build_parser
from jobs.worker.tasks.squad.task import SAMPLE
from provision.host import Result
from tests.harness.command_line import CommandLine
from tests.harness.failures import one_for_all
from tests.infra.local.fakes import Endpoint
from tests.jobs.context import listed

_NOBODY = "http://127.0.0.1:9"
_BEGUN = {"began": 100, "nodes": ["node0", "node1"], "ranks_per_node": 2, "attempt": 1}
# The home of whoever made the cluster, in the folder where the commands run.
_MAKER = "maker"

# No argument of a process has a NUL in it; a byte that is no text arrives as a lone surrogate.
_TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40)
_ODD = st.sampled_from(
    (
        *("", " ", "-", "--", "-1", "0", "1", "2", "1_000", "0x10", "1e3", "1e400", "nan", "inf"),
        *("9" * 30, "9" * 500, "३", "½", "\udc80", "é", "a" * 300, "~", "~nobody-here/x", "../.."),
        *("/", ".", "/dev/null", "/dev/null/x", "*", "$HOME", "\n", "\x1b[31m", "%s", "{0}", "["),
    )
)
_DURATIONS = [
    *("1m", "30m", "2h", "8h", "2d", "30d", "31d"),
    *("0h", "0.00001m", "99999999d", "1.5h", "8"),
]
_GOOD: dict[str, list[str]] = {
    "name": ["spr", "bert"],
    "region": ["us-east-1", "eu-west-1", "us-east-1a", "us-east-9", "eu-west-11"],
    "nodes": ["1", "2", "3", "256", "257"],
    "instance_types": ["r7iz.metal-16xl", "r7iz.metal-16xl,m7i.metal-24xl", "c6i.16xlarge", ","],
    "stack": ["intel", "upstream", "Intel"],
    "ttl": _DURATIONS,
    "idle_timeout": _DURATIONS,
    "time": _DURATIONS,
    "max_price": ["3", "0.5", "1000", "1001", "0"],
    "ssh_cidr": [
        *("203.0.113.7/32", "0.0.0.0/0", "203.0.113.7", "::1/128"),
        *("203.0.113.7/24", "auto,::/0"),
    ],
    "subnet_ids": ["subnet-0", "subnet-0123456789abcdef0", "subnet-01234567,subnet-89abcdef"],
    "capacity_reservation": ["cr-0", "cr-0123456789abcdef0", "none"],
    "volume_gib": ["20", "100", "16385"],
    "node": ["node0", "1", "node7"],
    "file": ["faults.toml"],
    "data": ["train.json"],
    "eval": ["train.json"],
    "results": ["out"],
    "model": ["scratch", "distilbert-base-uncased", "./model"],
    "cores": ["2", "32", "64"],
    "memory_gib": ["16", "512"],
    "numa": ["1", "2"],
    "threads_per_core": ["1", "2"],
    "ppn": ["1", "2", "3"],
    "ccl_workers": ["1", "2"],
    "image": ["ghcr.io/me/spr:1", "me/"],
    "namespace": ["training", "Training"],
    "claim": ["data", "-"],
    "node_selector": ["any", "pool=spr", "pool"],
    "job_name": ["bert", "Bert"],
    "run_qa": ["/workspace/qa", "qa"],
}


@dataclass(frozen=True)
class _Command:
    """A command's words, and all that it can be given."""

    words: tuple[str, ...]
    options: tuple[Option, ...]


def _commands(parser: Parser) -> Iterator[_Command]:
    """Every command of the real parser, from its own description of itself."""
    for each in parser.walk():
        yield _Command(tuple(each.prog.split()[1:]), tuple(each.options))


# These query package indexes, or start an embedded cloud.
_ASKING = (("stacks",), ("local", "bucket"))
_PARSERS = [build_parser(), *map(build_parser, COMMANDS)]
_COMMANDS = tuple(
    {
        c.words: c for parser in _PARSERS for c in _commands(parser) if c.words not in _ASKING
    }.values()
)


def _good(option: Option) -> st.SearchStrategy[str]:
    """Values that may well be right."""
    numbers = ["0.1", "1"] if option.parse is float else ["1", "2", "16"]
    usual = _GOOD.get(option.name) or (numbers if option.is_number else ["squad"])
    return st.sampled_from([*map(str, option.choices or usual)])


@st.composite
def _argv(draw: st.DrawFn) -> list[str]:
    """A command line that is right, nearly right, or nonsense."""
    command = draw(st.sampled_from(_COMMANDS))
    wildness = draw(st.sampled_from([0, 0, 1, 5]))
    argv = list(command.words)
    for option in command.options:
        needed = option.required or not option.flags
        if draw(st.integers(0, 9)) >= (9 if needed else 3):
            continue
        if option.flags:
            argv.append(draw(st.sampled_from(option.flags)))
        if not option.is_switch:
            odd = draw(st.integers(0, 9)) < wildness
            argv.append(draw(st.one_of(_ODD, _TEXT) if odd else _good(option)))
    if draw(st.integers(0, 19)) < wildness:
        argv.insert(draw(st.integers(0, len(argv))), draw(st.one_of(_ODD, _TEXT)))
    return argv


@pytest.fixture(scope="module")
def line(endpoint: Endpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandLine]:
    """A cloud with one cluster in it, in which one may only look."""
    folder = tmp_path_factory.mktemp("fuzz")
    with one_for_all(endpoint) as line, pytest.MonkeyPatch.context() as patch:
        # No test may touch the containers of this machine's own embedded cloud.
        patch.setattr("infra.local.cloud._has_podman", lambda: False)
        # Nor create a job on its Kubernetes.
        patch.setenv("KUBECONFIG", os.devnull)
        patch.chdir(folder)
        (folder / "faults.toml").write_text("profile = 'fast'\n")
        shutil.copy(SAMPLE, folder / "train.json")
        patch.setenv("SPR_CLUSTER_HOME", _MAKER)
        line.begin("--nodes", "2")
        # A job gets as far as the queue, which takes none.
        line.stage("node0", "# submitting a job", Result(1, "", "sbatch: error: no"))
        line.stage("node0", "# listing the jobs", Result(0, listed("squad", begin=_BEGUN), ""))
        silent = "distributing|removing the files|reading (a|the) log|following a job|collecting"
        for pattern in (f"# ({silent})", "cat .*(job|end).json", "-tuned.json", "~/spr-bench/"):
            line.stage("node0", pattern, Result(0, "", ""))
        line.stage("node0", "^exec python3", Result(127, "", "bash: python3: not found"))  # top
        policy = folder / "policy.json"
        policy.write_text(_render_looking())
        line.cloud.faults(f'[iam]\npolicy = "{policy}"\n')
        yield line


def _render_looking() -> str:
    policy = build_policy()
    return json.dumps({**policy, "Statement": policy["Statement"][:1]})


def _check(line: CommandLine, argv: list[str], *, reachable: bool, has_key: bool) -> None:
    """Run a command line with a separate home; it succeeds or explains why not."""
    before, line.url = line.changes, "" if reachable else _NOBODY
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPR_CLUSTER_HOME", folder)
        if has_key:
            shutil.copytree(_MAKER, folder, dirs_exist_ok=True)
        result = line.run(*argv)

    assert result.code in (0, 1, 2), result
    messages = [text for text in result.err.splitlines() if text.startswith("spr-cluster: ")]
    assert len(messages) == (1 if result.code else 0) or not argv, result
    assert all(text.removeprefix("spr-cluster: ").strip() for text in messages), result
    assert "Traceback" not in result.err + result.out
    if result.code == 2:
        assert line.changes == before, result


def _settings(examples: int) -> settings:
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )


@_settings(20)
@given(argv=_argv(), reachable=st.booleans(), has_key=st.booleans())
@example(argv=["train", "squad", "--data", "~nobody-here/x"], reachable=True, has_key=True)
@example(
    argv=["train", "squad", "--demo", "--results", "~nobody-here/x"], reachable=True, has_key=True
)
@example(argv=["gc", "--all", "--yes"], reachable=True, has_key=True)
@example(argv=["logs", "--rank", "-9"], reachable=True, has_key=True)
@example(argv=["iam-policy", "--check"], reachable=True, has_key=True)
def test_any_input_is_answered(
    line: CommandLine, argv: list[str], reachable: bool, has_key: bool
) -> None:
    _check(line, argv, reachable=reachable, has_key=has_key)


@pytest.mark.full
@_settings(1500)
@given(argv=_argv(), reachable=st.booleans(), has_key=st.booleans())
def test_any_input_is_answered_at_length(
    line: CommandLine, argv: list[str], reachable: bool, has_key: bool
) -> None:
    _check(line, argv, reachable=reachable, has_key=has_key)
