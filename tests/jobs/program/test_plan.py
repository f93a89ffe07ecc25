"""`run` from the command line to its results, with SSH faked."""

from __future__ import annotations

import io
import json
import re
import resource
import tarfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.errors import HostError, NoAnswerError, UsageError
from jobs.cli.run import build_request
from jobs.places.plan import JobFolder, JobPaths, new_job_id
from jobs.places.queue.session import run_job
from jobs.places.record import JobRecord, read_job_id
from jobs.program.plan import ProgramFiles, ProgramRequest, plan_program
from jobs.worker.spec import PlacementOptions, Resources
from jobs.worker.supervisor.launch import parse_launch
from provision.stacks.load import load_stack
from tests.fakes import FakeHost
from tests.jobs.context import (
    NOW,
    job_context,
    job_spec,
    make_hosts,
    mpirun_line,
    pack_output,
    parse_request,
    sent_variables,
)

PATHS = JobPaths(new_job_id("run", NOW))
RESULTS = Path("results", PATHS.job_id)
_ASKS = re.compile("# (querying|listing the jobs)")
"""Commands that change nothing on a node."""


def hosts_for(lines: list[str], exit_code: int = 0) -> dict[str, FakeHost]:
    hosts = make_hosts(lines, exit_code)
    head = hosts["node0"]
    head.answers[:0] = [("# collecting", "at 5\noutput node2\n")]
    head.files["results.tar"] = pack_output({"log": b"", "workers/node1/output/x": b""})
    return hosts


def start(
    hosts: dict[str, FakeHost], request: ProgramRequest, log: list[str] | None = None
) -> JobRecord:
    context = job_context(hosts, log=log)
    plan = plan_program(request, context.stack)
    return run_job(context, lambda _: plan).record


def program_request(results: Path, *command: str, **more: Any) -> ProgramRequest:
    names = {"nodes", "placement", "retries"} & more.keys()
    spec = job_spec(program=command or ("hostname",), **{name: more.pop(name) for name in names})
    return replace(ProgramRequest(spec, ProgramFiles({}), results), **more)


def test_a_program_is_sent_run_and_its_output_fetched(tmp_path: Path) -> None:
    script = tmp_path / "my script.py"
    script.write_text("print(1)")
    hosts, log = hosts_for(["hello"]), list[str]()
    command = ("python", "my script.py", "--lr", "1")
    sent = {"files": ProgramFiles({"my script.py": script}), "env": ("A=b c",)}

    done = start(hosts, program_request(tmp_path / "out", *command, **sent), log)

    line = mpirun_line(hosts["node0"], PATHS)
    assert f"-ppn 1 -wdir {PATHS.root} -n 3 " in line
    ours = "-m worker.program --folder=work --output=output"
    assert f"{ours} --environment=environment.json -- python 'my script.py' --lr 1" in line
    assert "-genv SPR_BACKEND gloo" in line
    upload = hosts["node0"].files[PATHS.upload]
    with tarfile.open(fileobj=io.BytesIO(upload)) as tar:
        assert f"{PATHS.relative_root}/work/my script.py" in tar.getnames()
        assert f"{PATHS.relative_root}/code/worker/program/__main__.py" in tar.getnames()
    assert sent_variables(hosts["node0"], PATHS) == ["A=b c"]
    assert "hello" in log
    assert "the output of node2 could not be fetched" in log
    assert (tmp_path / "out" / "node1" / "x").is_file()
    kept = json.loads((tmp_path / "out" / "job/job.json").read_text())
    assert kept["argv"] == ["python", "my script.py", "--lr", "1"]
    assert kept["command"] == "python 'my script.py' --lr 1"
    assert (kept["kind"], kept["exit_code"], kept["when"]) == ("run", 0, NOW.isoformat())
    assert [node["name"] for node in kept["nodes"]] == ["node0", "node1", "node2"]
    assert kept["placement"]["omp_threads"] == 2
    known = {"files": 1, "bytes": 8, "env": ["A"], "folders": {}, "packages": None, "outputs": None}
    assert kept["more"] == {**known, "results": str(tmp_path / "out")}
    assert "b c" not in json.dumps(kept) + line + "".join(log)
    assert "torch==2.13.0" in kept["packages"]
    assert kept["ended"] >= kept["when"]
    assert done.exit_code == 0


def test_ctrl_c_while_folders_are_sent_does_not_wait_for_a_silent_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered, inspected, waited_in_vain = threading.Event(), threading.Event(), list[bool]()

    def stay_silent(_: str) -> str:
        inspected.set()
        waited_in_vain.append(not answered.wait(60))
        raise NoAnswerError("node1", "no SSH")

    def press(*_: object) -> None:
        inspected.wait(60)
        raise KeyboardInterrupt

    monkeypatch.setattr("jobs.places.queue.session.send_folders", press)
    hosts = hosts_for([])
    hosts["node1"].answers[:0] = [("querying the facts", stay_silent)]
    hosts["node0"].answers[:0] = [("# removing the files", "removed")]
    folder = JobFolder(tmp_path, "spr-folders/x-1", "work", 1)
    try:
        with pytest.raises(KeyboardInterrupt):
            start(hosts, program_request(tmp_path / "out", folders=(folder,)))
        assert waited_in_vain == []
    finally:
        answered.set()
    assert PATHS.upload not in hosts["node0"].files, "its files are not sent anymore"
    assert not (tmp_path / "out").exists()


def test_only_so_many_nodes_are_used(tmp_path: Path) -> None:
    hosts = hosts_for([])

    start(hosts, program_request(tmp_path, nodes=2, placement=PlacementOptions(nproc_per_node=2)))

    assert f"-ppn 2 -wdir {PATHS.root} -n 4 " in mpirun_line(hosts["node0"], PATHS)
    launch = parse_launch(hosts["node0"].files[PATHS.uploaded("launch.json")].decode())
    assert [*launch.pinning] == ["node0", "node1", "node2"], "whichever are free"
    assert json.loads((tmp_path / "job/job.json").read_text())["nnodes"] == 2
    with pytest.raises(UsageError, match="--nodes 4: cluster bert has 3 nodes"):
        start(hosts_for([]), program_request(tmp_path, nodes=4))


def test_two_jobs_at_the_same_time_can_not_have_one_results_folder(tmp_path: Path) -> None:
    hosts, others = hosts_for([]), hosts_for([])
    refused: list[UsageError] = []

    def submit_another(_: str) -> str:
        context = replace(job_context(others), now=NOW.replace(second=59))
        plan = plan_program(program_request(tmp_path), context.stack)
        with pytest.raises(UsageError) as caught:
            run_job(context, lambda _: plan)
        refused.append(caught.value)
        return ""

    hosts["node0"].answers[:0] = [("# distributing", submit_another)]
    start(hosts, program_request(tmp_path))

    assert refused[0].message.endswith(f": it contains the results of job {PATHS.job_id}")
    assert all(map(_ASKS.match, others["node0"].commands))
    assert read_job_id(tmp_path) == PATHS.job_id


@pytest.mark.parametrize("is_full", [True, False])
def test_a_results_folder_that_can_not_be_written_is_noticed_before_anything_is_sent(
    tmp_path: Path, is_full: bool
) -> None:
    hosts, results = hosts_for([]), tmp_path / "here"
    if not is_full:
        results.write_text("a file")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100 if is_full else limits[0], limits[1]))
        with pytest.raises(
            UsageError, match=f"--results {results}: can't be written: (File|Not a) "
        ):
            start(hosts, program_request(results))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert results.exists() is not is_full
    assert all(map(_ASKS.match, hosts["node0"].commands))


@pytest.mark.parametrize("answer", ["removed", "", HostError("node0", "no answer")])
@pytest.mark.parametrize("step", ["# distributing", "# submitting"])
def test_a_job_that_can_not_be_submitted_leaves_nothing(
    tmp_path: Path, step: str, answer: str | HostError
) -> None:
    """If the queue may have it nevertheless, its results folder stays its own."""
    hosts, results = hosts_for([]), tmp_path / "here"
    full = HostError("node0", "tar: No space left on device")
    hosts["node0"].answers[:0] = [(step, full), ("# removing the files of a job", answer)]

    with pytest.raises(HostError, match="No space left on device"):
        start(hosts, program_request(results))
    assert "# removing the files of a job" in hosts["node0"].commands[-1]
    is_over = answer == "removed" or step == "# distributing"
    assert read_job_id(results) == ("" if is_over else PATHS.job_id)
    assert results.exists() is not is_over


def test_the_command_line_as_it_is_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").write_text("")

    def typed(*argv: str) -> ProgramRequest:
        return build_request(parse_request("run", *argv), RESULTS)

    asked = typed(
        *("--nodes=2", "--ppn=4", "--env=A=", "--env=RANKS=b=\nc", "--ccl-workers=2"),
        *("--backend=ccl", "--", "python", "x.py", "--nodes", "9", "--", "-v"),
    )
    assert asked.spec.work.program == ("python", "x.py", "--nodes", "9", "--", "-v")
    assert asked.env == ("A=", "RANKS=b=\nc")
    assert (asked.spec.resources.nodes, asked.backend) == (2, "ccl")
    assert asked.spec.resources.placement == PlacementOptions("auto", 4, 2)
    published = typed("--placement=reference", "hostname").spec.resources.placement
    assert published == PlacementOptions("reference")
    assert list(asked.files.files) == ["x.py"]
    assert asked.results == RESULTS
    assert typed("hostname").spec.work.program == ("hostname",)
    (tmp_path / "old").mkdir()
    (tmp_path / "old/x").touch()
    (tmp_path / "a/b").mkdir(parents=True)
    plan = plan_program(typed("--folder=.", "--output-dir=a/new", "go"), load_stack("upstream"))
    assert "--output-dir=a/new" in plan.argv
    assert "work/.keep" not in plan.files, "the folder creates work/ at the same time"
    assert "work/.keep" in plan_program(typed("hostname"), load_stack("upstream")).files
    outputs = [(f"--output-dir={each}", "--folder=.", "go") for each in ("old", "..", "/x", ".")]
    with pytest.raises(UsageError, match="--output-dir old contains files that are sent"):
        typed("--output-dir=old", "--folder=none", "--files=old/x", "go")
    for each in ("old", "old/new", "a"):
        with pytest.raises(UsageError, match="overlaps with --data-dir"):
            typed(f"--output-dir={each}", "--data-dir=old", "--data-dir=a/b", "go")
    for wrong in (("--", ""), ("--files=", "x"), *outputs):
        with pytest.raises(UsageError):
            typed(*wrong)


def test_packages_are_those_named_of_the_script_or_of_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def packages(*argv: str) -> tuple[str, ...]:
        found = build_request(parse_request("run", *argv), RESULTS).packages
        return found.lines if found else ()

    header = '# /// script\n# dependencies = ["one"]\n# ///\n'
    texts = {"a.py": header, "b.py": "", "requirements.txt": "two", "-e.txt": "-e ./sub"}
    texts |= {"sub/requirements.txt": "three", "sub/pyproject.toml": ""}
    texts |= dict.fromkeys(("sub/c.py", "sub/run.sh", "sub/ls"), "")
    (tmp_path / "sub").mkdir()
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    assert packages("python", "a.py") == ("one",)
    assert packages("python", "b.py") == packages("--packages=none", "python", "a.py") == ()
    assert packages("--packages=requirements.txt", "python", "a.py") == ("two",)
    for wrong, said in (("missing", "no such file"), ("-e.txt", "no folder is sent")):
        with pytest.raises(UsageError, match=said):
            packages(f"--packages={wrong}", "python", "b.py")
    (tmp_path / "spr-cluster.toml").touch()
    monkeypatch.chdir(tmp_path / "sub")
    assert packages("timeout", "60", "python", "c.py") == ("two",)
    assert packages("--packages=./requirements.txt", "python", "c.py") == ("three",)
    assert packages("--packages=a.py", "--folder=..", "python", "b.py") == ("one",)
    with pytest.raises(UsageError, match=f"{tmp_path}/sub/missing or {tmp_path}/missing"):
        packages("--packages=missing", "python", "c.py")
    (tmp_path / "requirements.txt").unlink()
    (tmp_path / "pyproject.toml").write_text('[tool.poetry.dependencies]\neinops = "*"\n')
    for command in ("solver", "lstopo", "/usr/bin/hostname", "./ls"):
        assert packages("--", command) == ()
    for command in ("env A=1 python3.11 c.py", "./run.sh", "zsh x", "make train", "mpirun x"):
        with pytest.raises(UsageError, match="dependencies are not read"):
            packages("--", *command.split())
    (tmp_path / "pyproject.toml").write_text("[project\n")
    with pytest.raises(UsageError, match=r"pyproject\.toml"):
        packages("solver")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "a"\ndependencies = ["b"]\n')
    assert packages("ls") == ()
    with (tmp_path / "pyproject.toml").open("a") as file:
        file.write('scripts.ls = "a:main"\n')
    assert packages("ls") == ("b",), "a script of the project"


def test_a_terminal_has_one_rank_and_needs_an_ssh_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.cli.run.has_terminal", lambda: True)
    asked = parse_request("run", "--pty", "--folder=none", "--", "bash")
    # Also on a node with several NUMA nodes.
    resources = build_request(asked, RESULTS).spec.resources
    assert resources == Resources(1, PlacementOptions(nproc_per_node=1))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UsageError, match="--pty needs ssh on this machine"):
        build_request(asked, RESULTS)
