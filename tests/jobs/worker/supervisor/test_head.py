"""The job's files on a head that is another machine, over connections that break."""

from __future__ import annotations

import errno
import io
import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jobs.worker.supervisor import head as batch_head
from jobs.worker.supervisor.head import HeadFolder
from jobs.worker.supervisor.storing import Storing
from tests.jobs.context import job_spec
from tests.jobs.places.this_machine import ThisMachine, wait_for

# Delivers as many bytes as the next line of the file `breaks` or `tars` says, and then breaks.
_BREAKS = r"""#!/bin/bash
cd {root} || exit
case "$*" in
  *"dd of="*) breaks=breaks ;;
  *"tar -C"*) breaks=tars ;;
  *"cat /"*) [ -s reads ] && sed -i 1d reads && exit 255 ;;
  *truncate*) breaks=files ;;
esac
if [ -s "$breaks" ]; then
  count=$(head -n 1 "$breaks")
  sed -i 1d "$breaks"
  head -c "$count" | {root}/bin/whole-ssh "$@"
  exit 255
fi
exec {root}/bin/whole-ssh "$@"
"""


@pytest.fixture
def worker(head: ThisMachine, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The job's folder on the node where this process is, which is not the head."""
    folder = head.connect("node1") / "spr-jobs/squad-1"
    folder.mkdir(parents=True)
    (folder / "log").write_text("of this node's earlier attempt\n")
    (head.bin / "ssh").rename(head.bin / "whole-ssh")
    head.write_program("ssh", _BREAKS.format(root=head.root))
    for name, value in {**head.environ, "HOME": str(head.root / "node1")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(batch_head, "_TRIES_S", 0.05)
    return folder


def on_head(head: ThisMachine, name: str = "log") -> Path:
    return head.home / "spr-jobs/squad-1" / name


def make_folder(worker: Path) -> HeadFolder:
    return HeadFolder(str(worker), "node0", worker / "log")


def test_json_files_are_written_in_one_piece(
    head: ThisMachine, worker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(worker)
    assert not folder.write("end.json", {"state": "failed"}), "there is no such folder yet"
    on_head(head).parent.mkdir(parents=True)
    assert not folder.exists("end.json")
    (head.root / "files").write_text("0\n5\n")
    assert folder.write("end.json", {"message": "it's \u00e9"}), "it breaks twice"
    assert folder.exists("end.json")
    assert json.loads(on_head(head, "end.json").read_text()) == {"message": "it's \u00e9"}
    monkeypatch.setattr("jobs.worker.supervisor.commands._REFUSED_S", 0)
    (head.root / "reads").write_text("0\n")
    assert folder.read("end.json") == {"message": "it's \u00e9"}, "a slow failure is tried again"
    assert folder.read("begin.json") == {}
    assert [path.name for path in on_head(head).parent.iterdir()] == ["end.json"]
    assert list(worker.iterdir()) == [worker / "log"]


@pytest.mark.parametrize("breaks", ["", "10\n", "0\n1000\n1\n70000\n", "100\n" * 9])
def test_no_line_is_lost_or_doubled_if_connections_break(
    head: ThisMachine, worker: Path, breaks: str
) -> None:
    (head.root / "breaks").write_text(breaks)
    on_head(head).parent.mkdir(parents=True)
    on_head(head).write_text("of the first attempt\n")
    folder, log = make_folder(worker), worker / "log"
    folder.copy_log(log.stat().st_size)

    lines = [f"line {number} {'x' * (number % 977)}\n" for number in range(400)]
    with log.open("a") as file:
        for number, line in enumerate(lines):
            file.write(line)
            file.flush()
            if number % 50 == 0:
                time.sleep(0.02)
    folder.finish()

    assert on_head(head).read_text() == "of the first attempt\n" + "".join(lines)


def test_a_head_that_answers_late_gets_the_whole_log(head: ThisMachine, worker: Path) -> None:
    away = head.home.rename(head.root / "away")
    folder, log = make_folder(worker), worker / "log"
    folder.copy_log(0)
    time.sleep(0.2)
    away.rename(head.home)
    with log.open("a") as file:
        file.write("more\n")
    wait_for(lambda: on_head(head).exists())
    folder.finish()
    assert on_head(head).read_text() == log.read_text()


def test_a_head_that_does_not_come_back_in_time_is_not_waited_for(
    head: ThisMachine, worker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head.home.rename(head.root / "away")
    monkeypatch.setattr("jobs.worker.supervisor.commands._PAUSE_S", (0.0, 0.0))
    fates = iter(["", "", "NODE_FAIL"])
    make_folder(worker).wait(lambda: next(fates))
    assert next(fates, None) is None, "Slurm ends the job soon"
    monkeypatch.setattr(batch_head, "_AWAY_S", 0)
    make_folder(worker).wait(lambda: "")


def test_results_arrive_without_the_state_of_the_job(head: ThisMachine, worker: Path) -> None:
    names = ("results.json", "model/checkpoint-5/w", "../output.state/checkpoints/step-000001/w")
    for name in names:
        (worker / "output" / name).parent.mkdir(parents=True, exist_ok=True)
        (worker / "output" / name).write_text(name)
    folder, before = make_folder(worker), threading.active_count()
    folder.copy_log(0)
    (head.root / "tars").write_text("2000\n")

    folder.send_results()
    folder.finish()

    output = on_head(head, "output")
    found = sorted(str(p.relative_to(output)) for p in output.rglob("*") if p.is_file())
    assert found == ["model/checkpoint-5/w", "results.json"]
    assert not on_head(head, "output.state").exists()
    assert threading.active_count() == before


def test_results_that_do_not_arrive_are_mentioned(
    head: ThisMachine, worker: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (worker / "output").mkdir()
    on_head(head).parent.mkdir(parents=True)
    (head.root / "tars").write_text("10\n" * 3)
    folder = make_folder(worker)
    folder.copy_log(0)

    folder.send_results()
    folder.finish()

    assert "copying them to node0 failed" in capfd.readouterr().out
    assert on_head(head).read_text() == (worker / "log").read_text()


def test_a_log_on_a_full_disk_changes_no_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.StringIO):
        def write(self, _: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("sys.stdout", Full())
    launch: Any = SimpleNamespace(folder="/", spec=job_spec(on_finish="echo said; exit 1"))
    Storing(launch, HeadFolder("/", "", Path("log")), ()).run_command("succeeded")
    monkeypatch.setattr(HeadFolder, "_send_results", lambda _: False)
    HeadFolder("/", "node0", Path("log")).send_results()
