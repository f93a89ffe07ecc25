"""Programs that write their results in many ways, unattended: each byte is stored, fetched, or named.

What a job left on the nodes is compared, by content, with what S3 and `fetch` have of it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.conftest import Baked, CommandLine, LiveCluster

# Six minutes: in `make test-full`.
pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(1800)]
NAME, URL = "night", "s3://night/team"
SENT = "a line of data\n"
_PRELUDE = """\
import os, signal, subprocess, sys, time
from pathlib import Path

out, rank = Path(os.environ["SPR_OUTPUT"]), os.environ["RANK"]

def put(path):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{path} of rank {rank}, {time.time_ns()}")
    return path

"""
PROGRAMS = {
    "trainer": 'put(out / "model/checkpoint-1500/model.safetensors")',
    "steps": 'put(out / "checkpoints/step-002000/state.pt")',
    "work": 'put("out/model.bin")',
    "our names": 'for name in ("log/a", "job.json/b", "job/c", "work/d", "node1/e"): put(out / name)',
    "our files": """\
for name in ("results.json", "end.json", "a.partial", ".hidden", "logs/rank-0.log"):
    put(out / name)
""",
    "hard links": 'os.link(put(out / "first"), out / "second")',
    "hub cache": """\
put(out / "hub/blobs/0a1b")
(out / "hub/snapshots/main").mkdir(parents=True)
(out / "hub/snapshots/main/model.bin").symlink_to("../../blobs/0a1b")
""",
    "link outside": '(out / "link-outside").symlink_to(put(f"/tmp/outside-{rank}"))',
    "not UTF-8": 'os.rename(put(out / "plain"), os.fsencode(out) + b"/caf\\xe9.bin")',
    "odd names": 'put(out / "two\\nlines"); put(out / "-rf"); put(out / "a \\"b\\" \\\'c\\\' $d")',
    "background": """\
loop = "while sleep 1; do date +%N >> $SPR_OUTPUT/events; done"
subprocess.Popen(["sh", "-c", loop, "tensorboard-like"])
time.sleep(1.5)
""",
    "daemon": """\
later = "sleep 3; echo late $RANK $$ > $SPR_OUTPUT/late"
subprocess.Popen(["setsid", "sh", "-c", later], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
""",
    "kill": 'put(out / "before-kill"); time.sleep(1); os.kill(-1, signal.SIGKILL)',
    "worker only": 'rank == "1" and put(out / "of-worker"); sys.exit(1)',
    "deep": 'put(out / "/".join(["deep"] * 60) / "file")',
    "many": 'for number in range(1500): put(out / f"many/{number}")',
    "rewritten": """\
times = os.stat("data.txt")
put("data.txt")
os.utime("data.txt", ns=(times.st_atime_ns, times.st_mtime_ns))
""",
    "pipe": 'os.mkfifo(out / "a-pipe"); put(out / "beside-pipe")',
    "unreadable": 'put(out / "locked").chmod(0); put(out / "beside-locked")',
    "empty": '(out / "empty").touch()',
}
ENDED_BY = {"kill": "failed", "worker only": "failed"}
"""The states of jobs that do not succeed."""
_ALONE = ("background", "daemon", *ENDED_BY)
GROUPS = {
    "files": [name for name in PROGRAMS if name not in _ALONE],
    "background and daemon": ["background", "daemon"],
    "worker only": ["worker only"],
    "kill": ["kill"],
}
_LIST = """\
import hashlib, json, os, stat, sys
top, found = os.path.expanduser("~/spr-jobs/" + sys.argv[1]).encode(), []
for part in (b"output", b"work"):
    for where, folders, files in os.walk(top + b"/" + part):
        for name in files:
            path, digest = where + b"/" + name, ""
            target = os.path.realpath(path)
            if os.path.isfile(target) and target.startswith(top) and os.access(target, os.R_OK):
                digest = hashlib.sha256(open(target, "rb").read()).hexdigest()
            found.append((os.path.relpath(path, top).decode("utf-8", "backslashreplace"), digest))
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Left:
    """A file that a job left on a node; without a digest, it has no content that could be fetched."""

    node: str
    name: str
    digest: str


@pytest.fixture(scope="module")
def night(cli: CommandLine, baked: Baked) -> Iterator[LiveCluster]:
    cli.run("local", "bucket", NAME)
    up = ("up", "--name", NAME, "--nodes", "2", "--cloud", "local", "--bucket", URL)
    yield LiveCluster(cli, cli.json(*up))
    cli.run("down", "--name", NAME, "--yes", check=None)


def submit(night: LiveCluster, folder: Path, names: list[str], *options: str) -> str:
    """Start a program made of some of the table, and return its job's ID."""
    folder.mkdir()
    text = _PRELUDE + "\n".join(PROGRAMS[name] for name in names) + "\n"
    (folder / "program.py").write_text(text)
    (folder / "data.txt").write_text(SENT)
    where = ("--name", NAME, "--folder", str(folder), "--detach", *options)
    where += ("--results", str(folder.with_name("own")))
    done = night.cli.run("run", *where, "--", "python", "program.py")
    found = re.search(r"\b[a-z]+-\d{8}-\d{6}-[a-z0-9]{3}\b", done.stdout + done.stderr)
    assert found, done.stdout + done.stderr
    return found[0]


def list_left(night: LiveCluster, folder: Path, job: str) -> list[Left]:
    script = base64.b64encode(_LIST.encode()).decode()
    sent = {hashlib.sha256(each.read_bytes()).hexdigest() for each in folder.iterdir()}
    found = []
    for node in night.names:
        told = night.cli.ssh(node, f"echo {script} | base64 -d | python3 - {job}", NAME)
        found += [Left(node, *each) for each in json.loads(told) if each[1] not in sent]
    assert any(each.digest for each in found), "the job wrote nothing"
    return found


def find_missing(left: list[Left], fetched: Path, said: str) -> list[Left]:
    """Return what is neither among the fetched files nor named."""
    files = [each for each in fetched.rglob("*") if each.is_file()]
    log = fetched / "job" / "log"
    said += log.read_text(errors="replace") if log.is_file() else ""
    digests = [hashlib.sha256(each.read_bytes()).hexdigest() for each in files]
    missing = []
    for each in left:
        # A hard link arrives as a file beside the other one.
        wanted = sum((other.node, other.digest) == (each.node, each.digest) for other in left)
        if not (each.digest and digests.count(each.digest) >= wanted):
            missing.append(each)
    return [each for each in missing if Path(each.name).name not in said]


def held(night: LiveCluster) -> str:
    command = "sudo env SPR_KEEPER=held sh /run/spr-cluster/keeper"
    return night.cli.ssh("node0", command, NAME).strip()


def check(night: LiveCluster, tmp_path: Path, names: list[str], *, bucket: bool) -> None:
    options = () if bucket else ("--bucket", "none")
    folder, results = tmp_path / "project", tmp_path / "results"
    job = submit(night, folder, names, *options)
    ended = night.cli.run("wait", job, "--name", NAME, "--timeout", "300", check=None)
    (state,) = {ENDED_BY.get(name, "succeeded") for name in names}
    assert ended.returncode == (state != "succeeded"), ended.stdout + ended.stderr
    left = list_left(night, folder, job)
    if bucket:
        stored = night.cli.run(
            "fetch", f"{URL}/{job}", "--cloud", "local", "--results", str(tmp_path / "stored")
        )
        missing = find_missing(left, tmp_path / "stored", stored.stdout + stored.stderr)
        assert not missing or held(night) != "nothing", f"lost with the nodes: {missing}"
    else:
        assert held(night) != "nothing", "the nodes would not wait for the results"
    done = night.cli.run("fetch", job, "--name", NAME, "--results", str(results), check=None)
    assert not find_missing(left, results, done.stdout + done.stderr)
    assert (results / "job" / "job.json").is_file()
    if "unreadable" in names:
        assert held(night) != "nothing", "its content is only on the nodes"
        for node in night.names:
            night.cli.ssh(node, f"chmod 600 ~/spr-jobs/{job}/output/locked", NAME)
        night.cli.run("fetch", job, "--name", NAME, "--results", str(results))
    assert held(night) == "nothing", "all has been fetched"


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("bucket", [True, False], ids=["bucket", "fetch"])
def test_programs_lose_nothing(
    night: LiveCluster, tmp_path: Path, group: str, bucket: bool
) -> None:
    check(night, tmp_path, GROUPS[group], bucket=bucket)
