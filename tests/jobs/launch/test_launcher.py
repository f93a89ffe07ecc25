"""A job on the head node: the real shell commands in this machine's bash."""

from __future__ import annotations

import os
import subprocess
import tarfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cluster.running_job import find_running_job
from infra.errors import ConnectionLostError, HostError, HostKeyError, JobError, UsageError
from jobs.launch.files import _extract, fetch, place_again, place_files
from jobs.launch.launcher import HeadLauncher
from jobs.launch.mpirun import LaunchCommand
from jobs.launch.plan import STOP_SECONDS, JobPaths
from provision.host import LineSink, Result


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
    stubborn = Path(paths.root, "stubborn")
    deadline = time.monotonic() + 10
    while not (stubborn.exists() and stubborn.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    pid = int(stubborn.read_text())

    canceller = threading.Thread(target=HeadLauncher(head).cancel, args=(paths, STOP_SECONDS))
    canceller.start()
    canceller.join(30)

    state = Path(f"/proc/{pid}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_a_cancelled_job_has_time_to_save_a_checkpoint(head: ThisMachine) -> None:
    """mpirun's script and the job's own would die of the signal at once, and end everything."""
    programs = head.home / "bin"
    programs.mkdir()
    hydra = programs / "mpiexec.hydra"
    hydra.write_text(
        "#!/bin/bash\ntrap 'sleep 1; echo kept > output/checkpoint; exit 143' TERM\n"
        "touch ready\nwhile :; do sleep 0.1; done\n"
    )
    hydra.chmod(0o755)
    paths = start(head, f"{hydra}; exit $?")
    deadline = time.monotonic() + 10
    while not Path(paths.root, "ready").exists() and time.monotonic() < deadline:
        time.sleep(0.05)

    HeadLauncher(head).cancel(paths, 30)

    assert Path(paths.output, "checkpoint").read_text() == "kept\n"
    assert Path(paths.exit_code).read_text().strip() == "143"


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

    fetch(head, paths, target)

    found = sorted(str(p.relative_to(target)) for p in target.rglob("*") if p.is_file())
    assert found == ["log", "model/w", "results.json"]
    assert Path(paths.fetched).is_file(), "`down` asks about results that were never fetched"


def two_nodes(head: ThisMachine, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The worker's home folder, which ssh enters."""
    programs, other = head.home / "bin", head.home / "worker"
    programs.mkdir()
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

    fetch(head, paths, target)

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
    fetch(head, paths, tmp_path / "here")

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
