"""A job on the head node: the real shell commands in this machine's bash."""

from __future__ import annotations

import gzip
import os
import signal
import subprocess
import tarfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cluster.running_job import (
    JOB_VARIABLE,
    find_job_addresses,
    find_running_job,
    render_end_of_job,
)
from cluster.ssh_mesh import render_ssh_config
from infra.errors import ConnectionLostError, HostError, HostKeyError, JobError, UsageError
from jobs.launch.files import _extract, fetch, place_again, place_files
from jobs.launch.launcher import HeadLauncher
from jobs.launch.mpirun import LaunchCommand
from jobs.launch.plan import STOP_SECONDS, JobPaths
from provision.host import LineSink, Result
from tests.cluster.test_ssh_mesh import NODES
from tests.jobs.context import event, pack_output


@dataclass
class ThisMachine:
    """A host whose commands run here, with a separate home folder."""

    home: Path
    name: str = "node0"
    drop_after: list[int] = field(default_factory=list)
    """The number of lines after which the next followed commands lose the connection."""
    refuse: HostError | None = None
    """What followed commands meet instead of the machine."""
    gone: str = ""

    def run(
        self,
        command: str,
        *,
        timeout_s: float | None = 120,
        check: bool = True,
        on_line: LineSink | None = None,
    ) -> Result:
        if on_line and self.refuse:
            raise self.refuse
        environment = {"HOME": str(self.home), "PATH": os.environ["PATH"]}
        limit = self.drop_after.pop(0) if on_line and self.drop_after else None
        lines = []
        with subprocess.Popen(
            ["bash", "-c", command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line)
                if on_line:
                    on_line(line.rstrip("\n"))
                if limit is not None and len(lines) == limit:
                    process.kill()
                    raise ConnectionLostError(self.name, "the connection broke")
        if check and process.returncode:
            raise HostError(self.name, "".join(lines))
        return Result(process.returncode, "".join(lines), "")

    def put(self, content: bytes, path: str, mode: int = 0o600) -> None:
        Path(path).write_bytes(content)
        Path(path).chmod(mode)

    def upload(self, source: Path, path: str) -> None:
        Path(path).write_bytes(source.read_bytes())

    def download(self, path: str, target: Path) -> None:
        target.write_bytes(Path(path).read_bytes())

    def close(self) -> None:
        return None

    def why_gone(self) -> str:
        return self.gone


@pytest.fixture
def head(tmp_path: Path) -> ThisMachine:
    (tmp_path / "hosts").write_text("node0\n")
    return ThisMachine(tmp_path)


def start(head: ThisMachine, script: str, job_id: str = "squad-1") -> JobPaths:
    paths = JobPaths(job_id, home=str(head.home))
    place_files(head, paths, {"output/.keep": b""})
    HeadLauncher(head).start(LaunchCommand(("bash", "-c", script), {"GREETING": "it's me"}), paths)
    return paths


def write_program(head: ThisMachine, name: str, text: str) -> Path:
    path = head.home / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def read_soon(path: Path, seconds: float = 10) -> str:
    """Return a file's text as soon as there is some."""
    deadline = time.monotonic() + seconds
    while not (path.exists() and path.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return path.read_text()


def is_gone(pid: int) -> bool:
    """Whether a process has ended, or is about to."""
    state = Path(f"/proc/{pid}/stat")
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_job_is_followed_until_it_ends(head: ThisMachine) -> None:
    paths = start(head, 'for i in 1 2 3; do echo "$GREETING $i"; sleep 0.3; done; exit 7')
    heard: list[str] = []

    assert HeadLauncher(head).follow(paths, heard.append) == 7
    assert heard == ["it's me 1", "it's me 2", "it's me 3"]
    assert find_running_job(head) is None


def test_a_broken_connection_loses_neither_the_job_nor_a_line(head: ThisMachine) -> None:
    head.drop_after = [1, 2]
    paths = start(head, "for i in 1 2 3 4 5; do echo line $i; sleep 0.2; done")
    heard: list[str] = []

    assert HeadLauncher(head).follow(paths, heard.append) == 0
    assert [line for line in heard if line.startswith("line")] == [f"line {i}" for i in range(1, 6)]
    assert sum("the job may still be running" in line for line in heard) == 2


def test_a_head_that_is_gone_for_good_is_not_waited_for(head: ThisMachine) -> None:
    paths = start(head, "sleep 20")
    head.gone = "i-0a is terminated"
    head.refuse = HostError("node0", "no SSH")

    with pytest.raises(JobError, match="squad-1 ended with its head node: i-0a is terminated"):
        HeadLauncher(head).follow(paths, lambda _: None)
    head.refuse = HostKeyError("node0", "another key")
    with pytest.raises(HostKeyError):
        HeadLauncher(head).follow(paths, lambda _: None)

    head.refuse = None
    HeadLauncher(head).cancel(paths, STOP_SECONDS)


def test_no_job_starts_while_another_runs(head: ThisMachine) -> None:
    paths = start(head, "sleep 60")

    assert find_running_job(head) == "squad-1"
    with pytest.raises(UsageError, match="job squad-1 is still running"):
        start(head, "true", "squad-2")
    HeadLauncher(head).cancel(paths, STOP_SECONDS)
    assert HeadLauncher(head).running_job() is None


def test_one_of_two_simultaneous_starts_is_refused(head: ThisMachine) -> None:
    first = start(head, "sleep 60")
    with pytest.raises(UsageError, match="job squad-1 is still running"):
        start(head, "echo never > ran", "squad-2")
    assert not list(head.home.glob("spr-jobs/squad-2/ran"))
    HeadLauncher(head).cancel(first, STOP_SECONDS)
    second = start(head, "sleep 60", "squad-2")
    assert find_running_job(head) == "squad-2"
    HeadLauncher(head).cancel(second, STOP_SECONDS)


def test_the_nodes_of_a_job_are_known_by_their_addresses(head: ThisMachine) -> None:
    (head.home / ".ssh").mkdir()
    (head.home / ".ssh" / "config").write_text(render_ssh_config(NODES))
    paths = JobPaths("squad-1", home=str(head.home))
    place_files(head, paths, {"output/.keep": b""})
    HeadLauncher(head).start(LaunchCommand(("true",), {}, nodes=2), paths)

    assert find_job_addresses(head, "squad-1") == ("172.31.0.10", "172.31.0.11")
    Path(paths.script).write_text("as an earlier version wrote it")
    assert len(find_job_addresses(head, "squad-1")) == 3


def test_a_refused_start_leaves_the_running_jobs_script_and_log_alone(head: ThisMachine) -> None:
    """Two that resume the same job at once share its folder."""
    paths = start(head, "echo mine; sleep 60")
    script = Path(paths.script).read_text()
    read_soon(Path(paths.log))

    place_again(head, paths, 1)
    with pytest.raises(UsageError, match="job squad-1 is still running"):
        HeadLauncher(head).start(LaunchCommand(("echo", "the other's"), {}), paths)

    assert Path(paths.script).read_text() == script
    assert Path(paths.log).read_text() == "mine\n"
    assert sorted(p.name for p in Path(paths.root).glob("run.sh*")) == ["run.sh"]
    HeadLauncher(head).cancel(paths, STOP_SECONDS)


def test_a_failed_start_names_its_cause(head: ThisMachine) -> None:
    paths = JobPaths("squad-1", home=str(head.home))
    place_files(head, paths, {"output/.keep": b""})
    (head.home / "spr-jobs" / ".lock").mkdir()
    with pytest.raises(JobError, match="squad-1 did not start on the head"):
        HeadLauncher(head).start(LaunchCommand(("true",), {}), paths)


def test_links_are_followed_and_the_upload_is_removed(head: ThisMachine, tmp_path: Path) -> None:
    (tmp_path / "blob").write_text("weights")
    model = tmp_path / "model"
    model.mkdir()
    (model / "w").symlink_to("../blob")
    paths = JobPaths("squad-1", home=str(head.home))

    place_files(head, paths, {"model": model, "environment.json": b"[]"})

    assert Path(paths.root, "model", "w").read_text() == "weights"
    assert not Path(paths.root, "model", "w").is_symlink()
    assert Path(paths.root, "environment.json").stat().st_mode & 0o777 == 0o600
    assert not Path(paths.upload).exists()


def test_a_reused_pid_is_not_a_running_job(head: ThisMachine) -> None:
    folder = head.home / "spr-jobs" / "squad-0"
    folder.mkdir(parents=True)
    (folder / "pid").write_text(str(os.getpid()))

    assert find_running_job(head) is None


def test_cancel_kills_processes_that_ignore_signals(head: ThisMachine) -> None:
    paths = start(head, "trap '' TERM; echo $$ > stubborn; while :; do sleep 0.2; done")
    pid = int(read_soon(Path(paths.root, "stubborn")))

    canceller = threading.Thread(target=HeadLauncher(head).cancel, args=(paths, STOP_SECONDS))
    canceller.start()
    canceller.join(30)

    assert is_gone(pid)


def test_a_cancelled_job_has_time_to_save_a_checkpoint(head: ThisMachine) -> None:
    """mpirun's script and the job's own would die of the signal at once, and end everything."""
    hydra = write_program(
        head,
        "mpiexec.hydra",
        "#!/bin/bash\ntrap 'sleep 1; echo kept > output/checkpoint; exit 143' TERM\n"
        "echo ready > ready\nwhile :; do sleep 0.1; done\n",
    )
    paths = start(head, f"{hydra}; exit $?")
    read_soon(Path(paths.root, "ready"))

    HeadLauncher(head).cancel(paths, 30)

    assert Path(paths.output, "checkpoint").read_text() == "kept\n"
    assert Path(paths.exit_code).read_text().strip() == "143"


# mpirun's program if a node of it is gone: it ignores signals, and waits for ssh in another session.
_STUCK = """#!/bin/bash
trap '' TERM
setsid sleep 300 &
echo $! > waiting
while :; do sleep 0.1; done
"""


def test_a_job_that_waits_for_a_lost_node_is_ended(head: ThisMachine) -> None:
    paths = start(head, f"{write_program(head, 'mpiexec.hydra', _STUCK)}; exit $?")
    waiting = int(read_soon(Path(paths.root, "waiting")))
    begin = time.monotonic()

    assert HeadLauncher(head).cancel(paths, 1) == ()

    assert time.monotonic() - begin < 20
    assert is_gone(waiting)
    assert find_running_job(head) is None
    assert Path(paths.exit_code).read_text() == "143\n"
    assert HeadLauncher(head).cancel(paths, 1) == ()
    HeadLauncher(head).start(LaunchCommand(("true",), {}), JobPaths("squad-1", str(head.home)))


def test_an_end_that_waits_does_not_end_the_resumed_job(head: ThisMachine) -> None:
    """Ctrl-C twice, and then `--resume`: the first end is still waiting on the head."""
    paths = start(head, f"{write_program(head, 'mpiexec.hydra', _STUCK)}; exit $?")
    read_soon(Path(paths.root, "waiting"))
    # It looks rarely, so it does not see that the job has ended in between.
    script = render_end_of_job("squad-1", 1).replace("sleep 0.2", "sleep 1.5")
    script = script.replace("leader=$started\n", "leader=$started\necho yes > looked\n", 1)
    patient = threading.Thread(target=head.run, args=(script,), kwargs={"check": False})
    patient.start()
    read_soon(Path(paths.root, "looked"))
    HeadLauncher(head).cancel(paths, 0)
    HeadLauncher(head).start(LaunchCommand(("sleep", "60"), {}), paths)
    patient.join(30)

    assert find_running_job(head) == "squad-1"
    HeadLauncher(head).cancel(paths, 0)


def test_what_is_left_of_a_job_whose_script_is_gone_is_ended(head: ThisMachine) -> None:
    hydra = write_program(head, "mpiexec.hydra", _STUCK)
    paths = start(head, f"setsid {hydra} & sleep 0.5; kill -KILL 0")
    waiting = int(read_soon(Path(paths.root, "waiting")))
    with pytest.raises(JobError, match="ended without an exit code"):
        HeadLauncher(head).follow(paths, lambda _: None)

    HeadLauncher(head).cancel(paths, 1)

    assert is_gone(waiting)
    assert Path(paths.exit_code).read_text() == "137\n"


def test_ranks_are_killed_on_every_node_and_an_unreachable_one_is_named(
    head: ThisMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = two_nodes(head, monkeypatch)
    hydra = write_program(head, "mpiexec.hydra", _STUCK)
    paths = start(head, f"{hydra}; exit $?")
    rank = {JOB_VARIABLE: f"{other}/{paths.relative_root}"}
    neighbor = {JOB_VARIABLE: f"{other}/{paths.relative_root}0"}
    read_soon(Path(paths.root, "waiting"))
    ssh = head.home / "bin" / "ssh"
    ssh.write_text(ssh.read_text().replace("bash\n", 'bash\n[[ "$*" = *node2* ]] && exit 255\n', 1))
    (head.home / "hosts").write_text("node0\nnode1\nnode2\n")
    with (
        subprocess.Popen(["sleep", "60"], env={**os.environ, **rank}) as frozen,
        subprocess.Popen(["sleep", "60"], env={**os.environ, **neighbor}) as another,
    ):
        frozen.send_signal(signal.SIGSTOP)
        try:
            assert HeadLauncher(head).cancel(paths, 0) == ("node2",)
            assert frozen.wait(10) == -signal.SIGKILL
            assert another.poll() is None
        finally:
            frozen.kill()
            another.kill()


@pytest.mark.parametrize("ends", [False, True], ids=["hangs", "ends by itself"])
def test_a_job_whose_rank_has_failed_ends_within_a_bounded_time(
    head: ThisMachine, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    monkeypatch.setattr("jobs.launch.mpirun.ERROR_GRACE_S", 2)
    failed = event(event="error", message="lost contact", rank=0, host="a", lost_peer=True)
    hydra = write_program(head, "mpiexec.hydra", _STUCK)
    paths = start(head, f"echo '{failed}'; " + ("sleep 0.5; exit 1" if ends else f"exec {hydra}"))
    begin = time.monotonic()

    code = HeadLauncher(head).follow(paths, lambda _: None)

    assert code == (1 if ends else 143)
    assert time.monotonic() - begin < 20
    assert find_running_job(head) is None


def test_a_cancelled_job_leaves_an_exit_code(head: ThisMachine) -> None:
    paths = start(head, "sleep 60")
    HeadLauncher(head).cancel(paths, STOP_SECONDS)
    assert Path(paths.exit_code).read_text().strip() == "143"


def test_a_job_without_an_exit_code_is_reported(head: ThisMachine) -> None:
    paths = start(head, "kill -KILL 0")
    with pytest.raises(JobError, match="ended without an exit code"):
        HeadLauncher(head).follow(paths, lambda _: None)


def test_a_worker_that_cannot_be_reached_is_named(
    head: ThisMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = head.home / "bin"
    programs.mkdir()
    (programs / "ssh").write_text("#!/bin/sh\n[ $1 = node2 ] && exit 255\nexec cat > /dev/null\n")
    (programs / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    (head.home / "hosts").write_text("node0\nnode1\nnode2\n")

    with pytest.raises(HostError, match="node2 can not be reached"):
        place_files(head, JobPaths("squad-1", home=str(head.home)), {"x": b"y"})


def test_results_are_fetched_and_stay_inside_the_target(head: ThisMachine, tmp_path: Path) -> None:
    paths = start(
        head, "mkdir -p output/model; echo '{}' > output/results.json; echo w > output/model/w"
    )
    HeadLauncher(head).follow(paths, lambda _: None)
    target = tmp_path / "results 'here'"

    fetch(head, paths, target, print)

    found = sorted(str(p.relative_to(target)) for p in target.rglob("*") if p.is_file())
    assert found == ["log", "model/w", "results.json"]
    assert Path(paths.fetched).is_file(), "`down` asks about results that were never fetched"


_BLOCK = b"x" * (100 << 10)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"Welcome to Ubuntu\n" * 100,
        gzip.compress(b"x"),
        pack_output(
            dict.fromkeys(
                (
                    "log",
                    "output/model/w",
                ),
                _BLOCK,
            )
        )[:150_000],
        pack_output(dict.fromkeys(("log",), _BLOCK))[:512] + b"\xff" * 512,
        pack_output(
            dict.fromkeys(
                (
                    "output/model",
                    "output/model/w",
                ),
                _BLOCK,
            )
        ),
    ],
    ids=["empty", "text", "gzip", "cut off", "half garbage", "a file and its folder"],
)
def test_a_damaged_archive_of_results_is_one_line(
    head: ThisMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    paths = JobPaths("squad-1", home=str(head.home))
    place_files(head, paths, {"output/.keep": b""})
    (head.home / "spr-jobs/squad-1/log").write_text("")
    monkeypatch.setattr(head, "download", lambda _, target: target.write_bytes(content))

    with pytest.raises(JobError, match="the results of job squad-1 arrived damaged: ") as caught:
        fetch(head, paths, tmp_path / "results", print)
    assert "\n" not in caught.value.message
    assert caught.value.hint == "to try again: spr-cluster fetch squad-1"


def two_nodes(head: ThisMachine, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The worker's home folder, which ssh enters."""
    programs, other = head.home / "bin", head.home / "worker"
    programs.mkdir(exist_ok=True)
    other.mkdir()
    ssh = (
        '#!/bin/bash\nwhile [ "${1#-}" != "$1" ]; do [ "$1" = -o ] && shift; shift; done; shift\n'
        f"here={head.home}; export HOME={other}\n"
        'exec bash -c "${*//$here/$HOME}"\n'
    )
    (programs / "ssh").write_text(ssh)
    (programs / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    (head.home / "hosts").write_text("node0\nnode1\n")
    return other


@pytest.mark.parametrize(("nodes", "found"), [("2", ["mine", "node1/theirs"]), (None, ["mine"])])
def test_the_workers_output_is_fetched_if_the_job_wants_it(
    head: ThisMachine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    nodes: str | None,
    found: list[str],
) -> None:
    """By `fetch` alone, too: the command that started the job may have lost its terminal."""
    worker = two_nodes(head, monkeypatch)
    paths = start(head, "mkdir -p output; touch output/mine")
    HeadLauncher(head).follow(paths, lambda _: None)
    theirs = worker / paths.relative_root / "output" / "theirs"
    theirs.parent.mkdir(parents=True, exist_ok=True)
    theirs.touch()
    if nodes:
        Path(paths.gather).write_text(nodes)
    said: list[str] = []

    fetch(head, paths, tmp_path / "results", said.append)

    files = [path for path in (tmp_path / "results").rglob("*") if path.is_file()]
    assert sorted(str(path.relative_to(tmp_path / "results")) for path in files) == ["log", *found]
    assert said == []


def test_every_ranks_files_are_fetched_without_checkpoints(
    head: ThisMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = two_nodes(head, monkeypatch)
    script = "mkdir -p output/{logs,metrics,checkpoints/step-000001}; touch output/results.json"
    paths = start(head, f"{script} output/checkpoints/step-000001/state.pt output/logs/rank-0.log")
    HeadLauncher(head).follow(paths, lambda _: None)
    for name in ("logs/rank-1.log", "metrics/rank-1.jsonl", "model/w"):
        file = worker / paths.relative_root / "output" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    target = tmp_path / "results"

    fetch(head, paths, target, print)

    found = {str(p.relative_to(target)) for p in target.rglob("*") if p.is_file()}
    ranks = {"logs/rank-0.log", "logs/rank-1.log", "metrics/rank-1.jsonl"}
    assert found == {"log", "results.json", *ranks}


def test_a_resumed_job_is_placed_on_a_replaced_node(
    head: ThisMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = start(head, "echo the first time")
    HeadLauncher(head).follow(paths, lambda _: None)
    place_files(head, paths, {"code/worker/x.py": b"x", "data/train.json": b"{}"})
    Path(paths.output, "results").write_text("stays where it is")
    worker = two_nodes(head, monkeypatch)

    place_again(head, paths, 2)
    HeadLauncher(head).start(LaunchCommand(("echo", "the second"), {}), paths)
    HeadLauncher(head).follow(paths, lambda _: None)
    fetch(head, paths, tmp_path / "here", print)

    there = worker / paths.relative_root
    found = {str(p.relative_to(there)) for p in there.rglob("*") if p.is_file()}
    assert found == {"code/worker/x.py", "data/train.json", "output/.keep"}
    assert (tmp_path / "here" / "log").read_text() == "the second\n"
    assert (tmp_path / "here" / "log.earlier").read_text() == "the first time\n"


def test_archive_members_outside_the_target_are_skipped(tmp_path: Path) -> None:
    archive = tmp_path / "evil.tar"
    with tarfile.open(archive, "w") as tar:
        tar.add(__file__, "output/../../outside")
        tar.add(__file__, "output/inside")
    target = tmp_path / "deep" / "target"
    with tarfile.open(archive) as tar:
        _extract(tar, target)

    assert (target / "inside").is_file()
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == ["evil.tar", "inside"]
