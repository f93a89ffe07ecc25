"""A rank that runs a program: environment, placement, signals, and errors."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from infra.wait import wait_until
from jobs.worker.program.__main__ import _explain_import
from jobs.worker.program.environment import describe_end, program_environment
from jobs.worker.runtime.errors import WorkerError
from jobs.worker.runtime.events import MARK, parse_event, prefix_of
from jobs.worker.runtime.output import last_line
from jobs.worker.runtime.pinning import VARIABLE, RankPlacement, format_cpus, render_plan
from jobs.worker.runtime.process import NODES
from jobs.worker.storage.ownership import find_all

CPU = min(os.sched_getaffinity(0))
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
_ASK = """
import spr_cluster
for name in ("Cluster", "nothing"):
    try:
        getattr(spr_cluster, name)
    except (ImportError, AttributeError) as error:
        print(type(error).__name__, error)
"""
_TELL = (
    "import json, os; print(json.dumps({'env': dict(os.environ), 'cwd': os.getcwd(), "
    "'cpus': sorted(os.sched_getaffinity(0))}))"
)


def start(node: Path, *program: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run a rank to its end."""
    rank = begin(node, *program, **more)
    out, err = rank.communicate(timeout=60)
    return subprocess.CompletedProcess(program, rank.returncode, out, err)


def begin(
    node: Path,
    *program: str,
    own: tuple[str, ...] = (),
    plan: RankPlacement | None = None,
    options: tuple[str, ...] = (),
) -> subprocess.Popen[str]:
    """Start one rank of four, pinned to a CPU, as mpirun does."""
    planned = {VARIABLE: render_plan([plan, plan])} if plan else {}
    (node / "work").mkdir(exist_ok=True)
    (node / "environment.json").write_text(json.dumps(own))
    argv = ["--folder=work", "--output=output", *options]
    argv += ["--environment=environment.json"] if own else []
    return subprocess.Popen(
        [sys.executable, "-m", "worker.program", *argv, "--", *program],
        cwd=node,
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": f"{node}/code",
            "MASTER_ADDR": "172.31.0.10",
            "MASTER_PORT": "29500",
            "OMP_NUM_THREADS": "1",
            MARK: "0a",
            NODES: "node0,node2",
            **HYDRA,
            **planned,
        },
        preexec_fn=lambda: os.sched_setaffinity(0, {CPU}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def event_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return the event at the end of what a rank printed."""
    found = parse_event(done.stdout[done.stdout.rindex(prefix_of("0a")) :], "0a")
    assert found is not None
    return found


def test_the_program_gets_torchs_env_variables(node: Path) -> None:
    plan = RankPlacement(format_cpus([CPU]), 1, None)

    done = start(node, sys.executable, "-c", _TELL, own=("SEED=7", "NOTE=a=b c"), plan=plan)

    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    wanted = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    wanted |= {"GROUP_RANK": "1", "ACCELERATE_USE_CPU": "true", "TORCHELASTIC_RUN_ID": node.name}
    wanted |= {"MASTER_ADDR": "172.31.0.10", "MASTER_PORT": "29500", MARK: "0a"}
    wanted |= {"SPR_OUTPUT": f"{node}/output", "SEED": "7", "NOTE": "a=b c"}
    assert {name: result["env"].get(name) for name in wanted} == wanted
    # Our own code is not in the way of the program's, except under one name.
    imports = Path(result["env"]["PYTHONPATH"])
    assert imports.is_relative_to(node / "code")
    assert [each.name for each in imports.iterdir()] == ["spr_cluster"]
    (node / "work/jobs.py").write_text("")  # the user's own module
    asked = start(node, sys.executable, "-c", _ASK)
    assert asked.stdout.splitlines() == [
        "ImportError Cluster needs spr-cluster, which is not installed on nodes",
        "AttributeError module 'spr_cluster' has no attribute 'nothing'",
    ]
    assert result["cwd"] == f"{node}/work"
    assert result["cpus"] == [CPU]


def test_an_unchanged_program_writes_to_the_output(node: Path) -> None:
    script = "mkdir -p out/deep; echo one >> out/deep/x; echo > $SPR_OUTPUT/y; ls -d $SPR_OUTPUT"
    for _ in range(2):  # the second rank of a node finds the link
        done = start(node, "sh", "-c", script, options=("--output-dir=out",))
        assert (done.stdout, done.stderr) == (f"{node}/output\n", "")
    assert (node / "output/deep/x").read_text() == "one\none\n"
    assert (node / "output/y").is_file()


def test_what_a_program_writes_is_newer_than_the_mark_of_its_start(node: Path) -> None:
    for text in ("one", "two"):  # the second rank of a node keeps the mark
        assert start(node, "sh", "-c", f"echo {text} >> model.bin").returncode == 0
        found = {item.name for item in find_all(str(node)).items}
        assert "work/model.bin" in found
    assert not {name for name in found if name.startswith("work/") and "model" not in name}


def test_arguments_and_exit_code_pass_through(node: Path) -> None:
    done = start(node, "sh", "-c", 'echo "$@"; exit 7', "name", "--folder=x", "--", "it's")

    said = event_of(done)
    assert (done.returncode, done.stdout.splitlines()[0]) == (7, "--folder=x -- it's")
    assert said["message"] == "sh ended with exit code 7: --folder=x -- it's"
    assert said["exit_code"] == 7
    assert (node / "output.state/logs/rank-3.log").read_text() == done.stdout


_GLOO = "RuntimeError: [/a/gloo/transport/tcp/pair.cc:553] Connection closed by peer"
_TRACE = "Traceback (most recent call last):\n"


@pytest.mark.parametrize(
    ("printed", "last"), [(f"{'x' * 99}\n" * 9999 + "the last\n", "the last"), (_GLOO, _GLOO)]
)
def test_a_failure_has_the_last_line_of_its_own_rank(node: Path, printed: str, last: str) -> None:
    (node / "work").mkdir()
    (node / "work/said").write_text(printed)
    said = event_of(start(node, "sh", "-c", "cat said >&2; exit 1"))
    assert said["message"] == f"sh ended with exit code 1: {last}"
    assert said["lost_peer"] is (last == _GLOO)


@pytest.mark.parametrize(
    ("printed", "last"),
    [
        ("", ""),
        (f"step 1\rstep 2\n{_TRACE}  x\nKeyError: 'a'\n", "KeyError: 'a'"),
        (
            f"[rank3]: {_TRACE}[rank3]:   raise\n[rank3]: m.OwnError: b\n"
            "[rank3]:[W1127] Warning: destroy_process_group() was not called\n",
            "m.OwnError: b",
        ),
        (
            f"{_TRACE}  x\nKeyError: 'a'\n\nDuring handling\n\n"
            f"{_TRACE}  y\nValueError: b\nwith a second line\n",
            "ValueError: b",
        ),
        (f"[rank3]: {_TRACE}[rank3]:   x\n[rank3]: {_GLOO}", _GLOO),
    ],
)
def test_an_exception_says_more_than_the_last_line(tmp_path: Path, printed: str, last: str) -> None:
    (tmp_path / "log").write_text(printed)
    assert last_line(tmp_path / "log") == last


def test_a_missing_module_of_a_src_folder_is_explained(
    node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hint = "src/ can be imported only with a pyproject.toml, or with --env PYTHONPATH=src"
    (node / "work/src").mkdir(parents=True)
    (node / "work/src/mine.py").touch()
    said = event_of(start(node, sys.executable, "-c", "import mine.deep"))
    assert said["message"].endswith("ModuleNotFoundError: No module named 'mine'")
    assert said["hint"] == hint
    (node / "work/src/package").mkdir()
    monkeypatch.chdir(node)
    for name, known in (("package", hint), ("other", None)):
        assert _explain_import(f"ModuleNotFoundError: No module named '{name}'") == known


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_a_killed_program_is_reported_with_its_signal(
    node: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    (node / "bin").mkdir()
    (node / "bin/journalctl").write_text("#!/bin/sh\nexit 1\n")
    (node / "bin/journalctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{node}/bin:{os.environ['PATH']}")
    done = start(node, "sh", "-c", f"kill -{number} $$")
    said, killed = event_of(done), number == signal.SIGKILL
    assert done.returncode == 128 + number
    memory = ", perhaps for lack of memory" if killed else ""
    assert said["message"] == f"sh was ended by signal {number}{memory}"
    assert ("destroy_process_group() at the end" in (said["hint"] or "")) is not killed


@pytest.mark.parametrize(
    ("code", "after"), [(134, ", as after signal 6"), (200, ""), (255, ""), (128, "")]
)
def test_an_exit_code_is_no_signal(code: int, after: str) -> None:
    assert describe_end("sh", code) == f"sh ended with exit code {code}{after}"


def test_the_program_gets_signals_and_never_outlives_its_rank(node: Path) -> None:
    for number, code in ((signal.SIGTERM, 143), (signal.SIGKILL, -9)):
        rank = begin(node, "sh", "-c", "echo $$; exec sleep 60")
        assert rank.stdout is not None
        pid = int(rank.stdout.readline())
        # Its handlers come after the program.
        wait_until("handlers", partial(_handles_sigterm, rank.pid), deadline_s=30, every_s=0.02)

        rank.send_signal(number)
        rest, _ = rank.communicate(timeout=20)

        assert (rank.returncode, rest) == (code, "")
        # A killed process is gone when the kernel finds the time.
        wait_until("its end", partial(_has_ended, pid), deadline_s=10, every_s=0.02)


@pytest.mark.parametrize("daemon", ["sleep 6071", "env -i setsid sh -c 'sleep 6072 & sleep 6073'"])
def test_what_a_program_leaves_running_is_named_and_killed(node: Path, daemon: str) -> None:
    """It may hold the output, and mpirun would wait for that."""
    # No other test sleeps that long: all processes of this machine are searched.
    source = Path(node, "code/worker/program/__main__.py")
    text = source.read_text()
    assert "GRACE_S = 30.0" in text
    source.unlink()  # it may be a link
    source.write_text(text.replace("GRACE_S = 30.0", "GRACE_S = 0.5"))
    done = start(node, "sh", "-c", f"{daemon} & (sleep 0.1; echo late) & echo $!", options=())

    pid, late, _ = done.stdout.splitlines()
    assert (done.returncode, late) == (0, "late")
    found = event_of(done)
    assert "warning: rank 3 on node2: " in found["text"]
    assert re.search(r"which are killed: \d+ \((sh -c )?sleep 607\d", found["text"]), found["text"]
    assert pid not in found["text"]
    assert not subprocess.run(["pgrep", "-fx", "sleep 607[1-3]"], capture_output=True).stdout


def _handles_sigterm(pid: int) -> bool | None:
    (caught,) = re.findall(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1) or None


def _has_ended(pid: int) -> bool | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z" or None
    except OSError:
        return True


def test_a_rank_with_wrong_placement_never_starts_the_program(node: Path) -> None:
    done = start(node, "touch", "started", plan=RankPlacement("900-901", 4, None))

    said = event_of(done)
    assert done.returncode == 1
    assert (said["event"], said["rank"]) == ("error", 3)
    assert f"CPUs 900-901 planned, {CPU} found; 4 threads planned, 1 found" in said["message"]
    assert not (node / "work" / "started").exists()


def test_a_missing_program_is_one_clear_line_and_a_missing_folder_is_created(node: Path) -> None:
    done = start(node, "no-such-program")
    message = "no-such-program can't be run: No such file or directory"
    assert (done.returncode, event_of(done)["message"], done.stderr) == (127, message, "")
    done = start(node, "pwd", options=("--folder=work/sub/a",))
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, str(node / "work/sub/a"))
    (node / "work/link").symlink_to("gone")
    done = start(node, "pwd", options=("--folder=work/link",))
    message = "pwd can't be run: work/link: No such file or directory"
    assert (done.returncode, event_of(done)["message"]) == (127, message)


def test_the_users_variables_take_precedence() -> None:
    environ = {"PYTHONPATH": "ours", "LD_PRELOAD": "ours", "KEPT": "1"}
    found = program_environment(environ, "/out", ("PYTHONPATH=src", "LD_PRELOAD="))
    assert (found["PYTHONPATH"], found["LD_PRELOAD"], found["KEPT"]) == ("src", "", "1")


def test_torchrun_in_every_rank_starts_one_group() -> None:
    environ = {**HYDRA, "MPI_LOCALNRANKS": "1", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
    found = program_environment(environ, "/out", ())
    wanted = {"NNODES": "4", "NODE_RANK": "3", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
    assert {name: found.get(f"PET_{name}") for name in wanted} == wanted
    several = program_environment({**environ, "MPI_LOCALNRANKS": "2"}, "/out", ())
    assert not [name for name in several if name.startswith("PET_")]


def test_the_code_runs_on_python_3_8_the_oldest_of_any_stack(node: Path) -> None:
    listing = (
        "import sys, worker.program.__main__, worker.supervisor.__main__, worker.supervisor.listing; "
        "import worker.supervisor.log_reader, worker.array.__main__, worker.storage.restore; "
        "import worker.storage.push; "
        "print(*(m.__file__ for n, m in sys.modules.items() if n.split('.')[0] == 'worker'))"
    )
    sources = subprocess.run(
        [sys.executable, "-c", listing],
        env={"PYTHONPATH": f"{node}/code"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert len(sources) >= 20
    for source in sources:
        text = Path(source).read_text()
        ast.parse(text, feature_version=(3, 8))
        # New syntax that `ast` accepts all the same, methods, and parameters.
        assert "with (\n" not in text
        assert "removeprefix(" not in text
        assert "strict=" not in text


def test_torchs_variables_come_from_torchrun_or_mpirun_or_neither() -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for environ, wanted in (({}, alone), (torchrun, torchrun)):
        found = program_environment({**environ, "MASTER_ADDR": "a"}, "/out", ())
        assert {name: found[name] for name in wanted} == wanted
    for environ, said in (
        ({**HYDRA, "MPI_LOCALRANKID": "x"}, "not numbers"),
        ({**torchrun, "RANK": "4"}, "RANK 4 does not fit WORLD_SIZE 4"),
    ):
        with pytest.raises(WorkerError, match=said):
            program_environment({**environ, "MASTER_ADDR": "a"}, "/out", ())
