"""`attach`, `wait`, `logs`, and `--detach` as commands. The head's answers are staged."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.errors import ConnectionLostError
from provision.host import Result
from tests.harness.command_line import Act, CommandLine, StagedHost
from tests.jobs.context import ended, event, listed, pack_output

_BEGUN = {"began": 1800000000, "nodes": ["node0"], "ranks_per_node": 2, "attempt": 1}
_ERROR = event(event="error", message="NaN", hint="lower it", rank=1, host="ip-5", lost_peer=False)


def say(*lines: str) -> Act:
    """An answer that prints these lines."""

    def act(on_text: Any) -> Result:
        for each in lines:
            on_text(each)
        return Result(0, "", "")

    return act


class Head:
    """A head on which a job runs until it is followed to its end, or is asked for so many times."""

    def __init__(self, line: CommandLine) -> None:
        self.state, self.output, self.asked_until_end = "succeeded", ["text"], 2
        self.end: dict[str, Any] = {}
        self.earlier: list[str] = []
        self.breaks = 0
        """How often the connection breaks after the first question."""
        self.over = False
        self.limits: dict[str, Any] = {}
        self.files = {"log": b"text\n", "output/results.json": b"{}"}
        self.answers = {
            "# listing the jobs": self.list_jobs,
            "# following a job": self.follow,
            "# (distributing|submitting|collecting)": lambda _: Result(0, "at 5", ""),
            "# reading the log of earlier runs": lambda show: say(*self.earlier)(show),
            "cat .*/end.json": lambda _: Result(0, self.render_end(), ""),
        }
        line.machines.staged.clear()
        for pattern, answer in self.answers.items():
            line.stage("node0", pattern, answer)

    def render_end(self) -> str:
        values = {"exit_code": 0 if self.state == "succeeded" else 3, "nodes": ["node0"]}
        return ended(self.output, **{**values, "state": self.state, **self.end})

    def list_jobs(self, _: object) -> Result:
        self.asked_until_end -= 1
        if self.breaks and self.asked_until_end < 1:
            self.breaks -= 1
            raise ConnectionLostError("node0", "the connection broke")
        over = self.over or self.asked_until_end < 0
        runs = {"queue": ["RUNNING", "None", "node0"], "end": {}}
        now = {"end": json.loads(self.render_end())} if over else runs
        return Result(0, listed("squad-1", begin=_BEGUN, **self.limits, **now), "")

    def follow(self, on_text: Any) -> Result:
        self.over = True
        return say(*self.output)(on_text)


@pytest.fixture
def line(one: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CommandLine:
    monkeypatch.setenv("SPR_CLUSTER_HOME", str(one.cloud.ctx.files.folder.parent))
    monkeypatch.chdir(tmp_path)
    return one


@pytest.fixture
def head(line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> Head:
    found = Head(line)

    def download(_: StagedHost, command: str) -> Iterator[bytes]:
        yield pack_output(found.files)

    monkeypatch.setattr(StagedHost, "download", download)
    return found


def test_the_only_job_is_followed_from_its_beginning_and_fetched(
    line: CommandLine, head: Head
) -> None:
    head.files |= {
        "output/results.json": b'{"f1": 1, "ranks": 3}',  # the user's
        "job.json": b'{"job": "squad-1", "kind": "run"}',
    }
    result = line.must("attach")

    assert "text\n" in result.err
    assert result.out == (
        "job squad-1 succeeded after 7.5 s\noutput, log, and job.json: results/squad-1/\n"
    )
    assert Path("results/squad-1/results.json").exists()
    # It is over; the newest job is waited for, but not attached to without its name.
    found = json.loads(line.must("attach", "squad-1", "--results", "here", "--json").out)
    assert (found["job"], found["state"], found["results"]) == ("squad-1", "succeeded", "here")
    assert (found["exit_code"], found["nodes"]) == (0, ["node0"])
    assert Path("here/job/log").exists()
    assert json.loads(line.must("wait", "--json").out)["job"] == "squad-1"
    assert line.must("wait", "--all").out == "No job is running or queued.\n"
    nothing = line.run("attach")
    assert (
        nothing.code == line.run("attach", "squad-9").code == line.run("attach", "$(id)").code == 2
    )
    assert nothing.message == (
        "no job is running or queued on cluster spr\n  → `spr-cluster jobs` lists the earlier ones, "
        "`spr-cluster fetch JOB` downloads one"
    )


def test_a_failure_is_explained_as_by_the_command_that_submitted_the_job(
    line: CommandLine, head: Head
) -> None:
    head.state, head.output = "failed", [_ERROR]
    record = {"job": "squad-1", "seconds": 7.5, "nodes": [{}]}
    head.files |= {"output/results.json": b'{"failed": 1}', "job.json": json.dumps(record).encode()}
    waited = line.run("wait", "squad-1", "--json")
    assert (waited.code, json.loads(waited.out)["exit_code"]) == (1, 3)
    assert waited.message == (
        "job squad-1 is failed: rank 1 on ip-5: NaN\n  → its log: spr-cluster logs squad-1 --name spr"
    )
    result = line.run("attach", "squad-1")
    assert result.code == 1
    assert result.message == (
        "rank 1 on ip-5: NaN\n  → lower it; the whole log is results/squad-1/job/log"
    )
    assert result.err.count("rank 1 on ip-5: NaN") == 1
    assert Path("results/squad-1/job/log").exists(), "the log of a failure is fetched, too"
    assert json.loads(Path("results/squad-1/results.json").read_text())["receipt"]["parts"]


@pytest.mark.parametrize("command", ["attach", "wait"])
@pytest.mark.parametrize("cluster", ["there", "gone", "of others"])
def test_a_lost_head_is_replaced_or_its_job_continues_from_the_bucket(
    line: CommandLine, head: Head, monkeypatch: pytest.MonkeyPatch, command: str, cluster: str
) -> None:
    def follow(_: object) -> Result:
        raise ConnectionLostError("node0", "the connection broke")

    line.machines.staged.insert(0, ("node0", "# following a job", follow))
    head.limits["bucket"], head.breaks = "s3://results/team", 9
    monkeypatch.setattr(StagedHost, "why_gone", lambda _: "i-0 is terminated", raising=False)
    if cluster == "gone":
        monkeypatch.setattr("infra.ec2.inventory.Inventory.alive", ())
    elif cluster == "of others":
        monkeypatch.setattr("infra.ec2.key_pair.fingerprint", lambda _: "SHA256:ours")

    result = line.run(command)

    assert result.message.startswith("job squad-1 ended with its head node: i-0 is terminated\n  →")
    hints = result.message.splitlines()[1:]
    if cluster == "there":
        assert hints[0].startswith("  → `spr-cluster repair --name spr` makes a worker the head")
        return
    assert [hint.partition(": ")[2] for hint in hints] == [
        "`spr-cluster up --name spr` creates a new one",
        "spr-cluster train squad --resume s3://results/team/squad-1 --name spr",
        "spr-cluster fetch s3://results/team/squad-1",
    ]


def test_wait_gives_up(line: CommandLine, head: Head) -> None:
    head.asked_until_end = 10**6
    result = line.run("wait", "--timeout", "1")
    assert (result.code, result.message) == (
        1,
        "job squad-1 is still running after 1 s; it continues\n"
        "  → to follow it: spr-cluster attach squad-1 --name spr; "
        "to end it: spr-cluster cancel squad-1 --name spr",
    )
    assert re.search(r"timed out after [\d.]+ s: Wait for squad-1", result.err)


def test_all_jobs_share_the_timeout(
    line: CommandLine, head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []

    def wait(_: str, probe: Any, *, deadline_s: float, every_s: float) -> Any:
        limits.append(deadline_s)
        head.over = True
        time.sleep(0.01)
        return probe()

    def list_two(show: object) -> Result:
        text = head.list_jobs(show).stdout
        return Result(0, text + text.replace("squad-1", "squad-2"), "")

    monkeypatch.setattr("jobs.cli.attach.wait_until", wait)
    line.machines.staged.insert(0, ("node0", "# listing the jobs", list_two))
    assert line.must("wait", "--all", "--timeout", "9").out.count("succeeded") == 2
    assert 9 > limits[0] > limits[1] + 0.009


def test_logs_show_events_as_text(line: CommandLine, head: Head) -> None:
    step = {"epoch": 1, "loss": 0.5, "samples_per_second": 2, "tokens_per_second": 9}
    restarted = event(event="restarted", attempt=2, nodes=["node0", "node2"])
    shown = event(event="step", step=1, total=4, eta_seconds=3, shares={"a": 1}, **step)
    head.earlier = ["of the first attempt"]
    array = event(event="elements", done=37, failed=2, total=100)
    lines = ("text", event(event="note", text="hello"), restarted, shown, array, _ERROR)
    line.stage("node0", "# reading a log", say(*lines))
    text = line.must("logs").out.splitlines()
    assert text[:4] == ["of the first attempt", "text", "hello", "attempt 2, on node0, node2"]
    assert text[4].endswith(
        "step 1/4  epoch 1.00  loss 0.500  2.0 samples/s  9 tokens/s  3.0 s left"
    )
    assert text[5:] == ["37 of 100 done, 2 failed", "rank 1 on ip-5: NaN", "  → lower it"]


def test_logs_since_a_time(line: CommandLine, head: Head) -> None:
    now = time.time()  # the cloud's own stands still
    old, new = (event(event="note", text="n", at=now - ago) for ago in (700, 500))
    line.stage("node0", "# reading a log", say("old", old, "old", new, "new"))
    assert line.must("logs", "--since", "10m").out == "n\nnew\n"


_ELEMENT = "--element can't be used with --rank, --since, or --follow"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--since soon", "--since 'soon': expected a duration"),
        (
            "--since 10m --rank 1",
            "--since needs event timestamps, which only the log of rank 0 has",
        ),
        ("--rank -1", "--rank -1: job squad-1 has the ranks 0 to 1"),
        *((f"--element 3 {more}", _ELEMENT) for more in ("--rank=0", "--follow", "--since=5m")),
    ],
)
def test_logs_that_do_not_exist(line: CommandLine, head: Head, words: str, said: str) -> None:
    result = line.run("logs", *words.split())
    assert (result.code, result.message[: len(said)]) == (2, said)


@pytest.mark.parametrize(
    "words", ["train squad --detach --demo", "train digits --detach", "run --detach -- hostname"]
)
def test_a_detached_job_is_left_to_the_cluster(line: CommandLine, head: Head, words: str) -> None:
    argv = words.split()
    line.stage("node0", "tuned.json", Result(0, "", ""))
    line.machines.staged[:] = [each for each in line.machines.staged if "following" not in each[1]]

    lines = line.must(*argv).out.splitlines()

    job = lines[0].split()[1]
    assert job.startswith({"squad": "squad-", "digits": "digits-"}.get(argv[1], "run-"))
    assert lines == [
        f"job {job} continues without this command",
        f"  to follow it: spr-cluster attach {job} --name spr",
        f"  to end it:    spr-cluster cancel {job} --name spr",
    ]
    other = words.replace("--detach", "--detach --json --results other")
    found = json.loads(line.must(*other.split()).out)
    assert (found["job"][:3], found["state"]) == (job[:3], "queued")


def test_a_connection_that_breaks_while_waiting_is_one_line(line: CommandLine, head: Head) -> None:
    def break_(_: object) -> Result:
        raise ConnectionLostError("node0", "the connection broke")

    line.machines.staged.insert(0, ("node0", "# listing the jobs", break_))
    assert line.run("wait").message == "[node0] the connection broke"
    head.breaks = 2
    line.machines.staged.pop(0)
    result = line.must("wait")
    assert result.out == (
        "Job squad-1 succeeded. To download its results: spr-cluster fetch squad-1 --name spr\n"
    )
    assert head.asked_until_end < 0
    assert "[node0] the connection broke" in result.err
