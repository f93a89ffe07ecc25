"""The command line: help, one-line usage errors, exit codes, signals."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.local_files import ClusterFiles, cluster_names, home, remembered_cloud
from infra.errors import HangupError
from infra.files import write_private
from jobs.cli import COMMANDS, SHORT_FORMS, build_parser, main
from tests.cluster.cli.test_down_losses import Terminal
from tests.harness.command_line import CommandLine, CommandResult


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> CommandResult:
    """Run a command that needs no cloud."""
    try:
        code = main(argv)
    except SystemExit as end:
        code = int(end.code or 0)
    out = capsys.readouterr()
    return CommandResult(code, out.out, out.err)


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: str) -> None:
        raise RuntimeError("bug")

    monkeypatch.setattr("cluster.cli.chosen_cluster.remembered_cloud", broken)
    with pytest.raises(RuntimeError, match="bug"):
        main(["status"])


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("iam-policy >/dev/full", 1, "a file or the output: No space left on device\n  → .*is th"),
        ("--version >/dev/full", 1, "a file or the output: No space left on device\n  → .*is th"),
        ("config --init <&- >&-", 2, "--init asks questions, but there is no terminal\n"),
        # Nothing goes to stdout, which a program may read.
        ("train squad --dry-run --data $(printf '\\377') 2>&-", 2, ""),
    ],
)
def test_a_full_disk_is_one_line_and_a_closed_stream_no_error(
    words: str, code: int, said: str
) -> None:
    shell = ["sh", "-c", f'exec "$0" -m jobs {words}', sys.executable]
    root = Path(__file__).parents[3]
    done = subprocess.run(shell, capture_output=True, text=True, check=False, cwd=root)
    assert (done.returncode, done.stdout) == (code, "")
    assert re.match(f"spr-cluster: {said}" if said else "$", done.stderr)
    assert done.stderr.count("\n") <= 2


def test_a_deleted_working_folder_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "deleted"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()

    result = run(capsys, "status")

    assert (result.code, result.message) == (
        2,
        "the working folder was deleted\n  → cd to another folder, or to it again if it was recreated",
    )


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    result = run(capsys)

    assert result.code == 2
    assert "spr-cluster up --nodes 4" in result.out
    listed = {row.split()[0] for row in result.out.splitlines() if row.startswith("  ")}
    assert listed >= {name for name, command in COMMANDS.items() if command.help}


@pytest.mark.parametrize("command", COMMANDS)
def test_examples_fit_into_80_columns(command: str) -> None:
    _, *own = build_parser(command).walk()
    lines = [line for parser in own for line in str(parser.epilog).splitlines()]
    # The help leaves two columns free.
    assert [line for line in lines if len(line) > 78] == []


@pytest.mark.parametrize("short", SHORT_FORMS)
def test_the_help_of_a_short_form_begins_with_its_meaning(
    capsys: pytest.CaptureFixture[str], short: str
) -> None:
    meant, _, first, second, _, usage, *_ = run(capsys, short, "--help").out.splitlines()

    command = " ".join(SHORT_FORMS[short]).replace("=", " ")
    assert meant.startswith(f"`{short}` is `{command}`")
    assert {each.split()[1] for each in (first, second)} == {short}
    assert usage.startswith(f"usage: spr-cluster {SHORT_FORMS[short][0]} ")


@pytest.mark.parametrize("command", ["train squad", "tune tag"])
def test_options_for_experts_are_in_the_advanced_help(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    usual = run(capsys, *command.split(), "--help").out
    full = run(capsys, *command.split(), "--help", "--advanced").out

    shown, all_ = (set(re.findall(r"^  (--[a-z-]+)", text, re.MULTILINE)) for text in (usual, full))
    assert shown < all_
    assert all_ - shown >= {"--wire", "--compile", "--accumulate", "--backend"}
    assert f"`--help --advanced` shows {len(all_ - shown)} more options" in usual
    assert "--advanced" not in full
    assert run(capsys, *command.split(), "--advanced").out == full


def test_help_imports_nothing_heavy() -> None:
    heavy = ["boto3", "botocore", "fabric", "paramiko", "rich", "pydantic", "torch", "moto"]
    code = (
        "import sys; from jobs.cli import build_parser; build_parser().format_help(); "
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("chosen", "left"), [("", "bought other"), ("other cloud", "bought mine")])
def test_reset_removes_the_keys_of_this_local_clouds_clusters_and_no_others(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    chosen: str,
    left: str,
) -> None:
    default, other = home() / ".local-cloud", tmp_path / "other cloud"
    known = (("mine", "local", default), ("other", "local", other), ("bought", "aws", ""))
    for name, cloud, folder in known:
        files = ClusterFiles.of(name)
        write_private(files.key, "key")
        files.remember(cloud, "us-east-1", folder=str(folder))
        assert remembered_cloud(name) == (cloud, "us-east-1")
    monkeypatch.setattr("cluster.cli.local.reset", lambda **_: None)
    monkeypatch.setattr("infra.local.cloud._has_podman", lambda: False)
    monkeypatch.setenv("SPR_CLUSTER_LOCAL_CLOUD", str(tmp_path / chosen) if chosen else "")

    assert run(capsys, "local", "reset").code == 0
    assert " ".join(cluster_names()) == left
    assert all(ClusterFiles.of(name).key.exists() for name in left.split())


# Questions


@pytest.mark.parametrize(("answer", "bought"), [("", False), ("maybe", False), ("YES", True)])
def test_on_a_terminal_up_asks(
    line: CommandLine, monkeypatch: pytest.MonkeyPatch, answer: str, bought: bool
) -> None:
    monkeypatch.setattr("cluster.console.output.sys", Terminal(answer))

    result = line.run("up", "--nodes", "1")

    assert result.code == (0 if bought else 2)
    assert bool(line.ids()) is bought
    assert bought or not line.changes


def test_without_a_terminal_yes_is_required(line: CommandLine) -> None:
    line.begin("--nodes", "2")
    line.lose(line.ids()[-1])
    before = line.changes

    for argv in (["up"], ["repair"], ["down"]):
        result = line.run(*argv)

        assert result.code == 2
        assert "this needs confirmation, but there is no terminal" in result.err
        assert result.err.endswith("\n  → --yes confirms\n")
    line.lose(line.ids()[-1])
    assert line.run("gc", "--all").code == 2
    assert line.changes == before


# Signals


def _exit_instead(code: int) -> None:
    raise SystemExit(code)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)]
)
def test_a_signal_exits_with_its_code_and_one_word(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    code: int,
) -> None:
    monkeypatch.setattr("jobs.cli._exit_at_once", _exit_instead)
    monkeypatch.setattr("cluster.cli.status.run", lambda _: signal.raise_signal(number))
    before = signal.getsignal(number)
    try:
        result = run(capsys, "status")
    finally:
        signal.signal(number, before)
    assert (result.code, result.err.strip()) == (code, "interrupted")


def test_an_interrupted_up_lists_resources_and_next_steps(
    line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> None:
        raise HangupError

    monkeypatch.setattr("jobs.cli._exit_at_once", _exit_instead)
    line.cloud.steps.before["install.sh"] = interrupted

    result = line.run("up", "--nodes", "2", "--yes")

    assert result.code == 129
    assert "To continue:           spr-cluster up --name spr\n" in result.err
    assert "To remove what exists: spr-cluster down --name spr\n" in result.err
    assert "It exists now and costs money: 2 instances (" in result.err
    assert result.err.endswith("interrupted\n")


def test_a_closed_pipe_prints_no_traceback() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "jobs", "iam-policy"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        err = process.stderr.read()
        process.wait(timeout=60)
    assert err == ""
    assert process.returncode == 1
