"""Slurm for tests: ``sbatch``, ``squeue``, ``scancel``, ``scontrol``, and ``sinfo`` on this machine.

One program, named like the command that it is. The queue is a file in the folder $FAKE_SLURM. There is no
daemon: each command starts what can start, and each job has a process that runs its batch script, in a
session of its own, and afterwards kills what has its SLURM_JOB_ID, like our epilog. Steps are the processes
that have SLURM_STEP_ID, too. As in Slurm, a job that ends is COMPLETING while something of it is left.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(os.environ.get("FAKE_SLURM", "/nowhere"))
KILL_WAIT_S = 4.0
_POLL_S, _SIGNAL_S = 0.02, 0.15
_TEXTS = ("script", "output", "cwd")
ACTIVE = ("PENDING", "RUNNING", "COMPLETING")
_TOO_FEW = (
    "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions"
)
_HELD = "JobHeldUser"
Job = dict[str, Any]


@contextmanager
def queue() -> Iterator[dict[str, Any]]:
    """The queue and the nodes, for changes by one process at a time."""
    with (ROOT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        content = read()
        yield content
        fresh = ROOT / "queue.new"
        fresh.write_text(json.dumps(content))
        fresh.replace(ROOT / "queue")


def read() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((ROOT / "queue").read_text())
    return content


def schedule(content: dict[str, Any]) -> None:
    """Start the jobs that can start, in their order."""
    reason = "Resources"
    for job in content["jobs"].values():
        if job["state"] != "PENDING" or job["reason"] == _HELD:
            continue
        used = {n for j in content["jobs"].values() if j["state"] != "PENDING" for n in j["on"]}
        usable = [
            name for name, up in content["nodes"].items() if up and not drained(content, name)
        ]
        free = [name for name in usable if name not in used]
        if job["begin"] > time.time():
            job["reason"] = "BeginTime"
        elif reason == "Resources" and len(free) >= job["least"]:
            _start(job, free[: job["most"]])
        elif reason == "Resources" and len(usable) < job["least"]:
            job["reason"], reason = _TOO_FEW, "Priority"
        else:
            job["reason"], reason = reason, "Priority"


def drained(content: dict[str, Any], name: str) -> str:
    """Why a node gets no jobs; "" if it does."""
    return str(content.get("drained", {}).get(name, ""))


def _start(job: Job, on: list[str]) -> None:
    job |= {"state": "RUNNING", "on": on, "reason": "None", "last": ""}
    subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(__file__).resolve()), job["id"]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={name: value for name, value in os.environ.items() if not name.startswith("SLURM_")},
        start_new_session=True,
    )


def stepd(id_: str) -> int:
    """Run a job's batch script on the first of its nodes, and end the job."""
    with queue() as content:
        job = content["jobs"][id_]
    # Each node has its own home.
    home = str(ROOT.parent / job["on"][0])
    script, output, cwd = (job[name].replace(job["home"], home) for name in _TEXTS)
    env = {"SLURM_JOB_ID": id_, "SLURM_JOB_NODELIST": ",".join(job["on"]), "HOME": home}
    if job["restarts"]:
        env["SLURM_RESTART_COUNT"] = str(job["restarts"])
    with Path(output).open("a") as log:
        process = subprocess.Popen(
            ["bash", "-c", script],
            cwd=cwd,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    with queue() as content:
        content["jobs"][id_]["pid"] = process.pid
    asked = False
    while process.poll() is None:
        kill_at = read()["jobs"][id_]["kill_at"]
        if kill_at and not asked:
            asked = True
            time.sleep(_SIGNAL_S)
            _signal(id_, signal.SIGTERM, lambda _: True)
        elif kill_at and time.time() > kill_at:
            _signal(id_, signal.SIGKILL, lambda _: True)
        time.sleep(_POLL_S)
    with queue() as content:
        job = content["jobs"][id_]
        job["last"] = job["last"] or ("FAILED" if process.returncode else "COMPLETED")
        job["state"] = "COMPLETING"
    # A node that does not answer keeps its job.
    while _signal(id_, signal.SIGKILL, lambda _: True) or (ROOT / "stuck").exists():
        time.sleep(_POLL_S)
    with queue() as content:
        job = content["jobs"][id_]
        job |= {"state": job["last"], "on": [], "kill_at": 0}
        schedule(content)
    if job["state"] == "PENDING":
        time.sleep(max(0.0, job["begin"] - time.time()))
        with queue() as content:
            schedule(content)
    return 0


def _signal(id_: str, number: int, matches: Callable[[bytes], bool]) -> int:
    """Send a signal to those processes of a job whose environment matches; return how many."""
    found = 0
    mine = (f"\0SLURM_JOB_ID={id_}\0".encode(), f"\0FAKE_SLURM={ROOT}\0".encode())
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            environ = b"\0" + path.read_bytes()
            # This may be a command of the job itself.
            if path.parent.name == str(os.getpid()) or any(each not in environ for each in mine):
                continue
            if matches(environ):
                os.kill(int(path.parent.name), number)
                found += 1
    return found


def _is_step(environ: bytes) -> bool:
    return b"\0SLURM_STEP_ID=" in environ


def _terminate(job: Job, last: str) -> None:
    """End a running job: it gets SIGTERM, and SIGKILL some time later."""
    job |= {"state": "COMPLETING", "last": last}
    job["kill_at"] = job["kill_at"] or time.time() + KILL_WAIT_S


def _requeue(job: Job) -> None:
    job |= {
        "restarts": job["restarts"] + 1,
        "begin": time.time() + float(os.environ["FAKE_REQUEUE_S"]),
    }
    _terminate(job, "PENDING")


def sbatch(words: list[str], options: dict[str, str]) -> int:
    script = Path(words[0]).read_text()
    given = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", script, re.MULTILINE))
    known = {"job-name", "nodes", "output", "requeue", "no-requeue", "exclusive", "mem"}
    assert options.keys() - {"hold"} == {"parsable"}, options
    assert given.keys() <= known, given
    # Without the second, a job would get only its cores' share of the memory.
    assert given.get("mem") == ("0" if "exclusive" in given else None)
    least, _, most = given["nodes"].partition("-")
    with queue() as content:
        id_ = str(len(content["jobs"]) + 1)
        content["jobs"][id_] = {
            "id": id_,
            "name": given["job-name"],
            "least": int(least),
            "most": int(most or least),
            "output": given["output"],
            "requeue": "requeue" in given,
            "script": script,
            "cwd": str(Path.cwd()),
            "home": os.environ["HOME"],
            "state": "PENDING",
            "reason": _HELD if "hold" in options else "None",
            "on": [],
            "last": "",
            "restarts": 0,
            "begin": 0,
            "kill_at": 0,
            "pid": 0,
        }
        schedule(content)
    print(id_)
    return 0


def squeue(words: list[str], options: dict[str, str]) -> int:
    assert "noheader" in options, options
    if "steps" in options:
        steps = ["batch", *(["0"] if _signal(options["job"], 0, _is_step) else [])]
        print("\n".join(f"{options['job']}.{step}" for step in steps))
        return 0
    for job in read()["jobs"].values():
        name = options.get("name", job["name"])
        states = options.get("states", "").upper() or ACTIVE
        if name != job["name"] or job["state"] not in states:
            continue
        reason = job["reason"] if job["state"] == "PENDING" else "None"
        row = options["format"]
        for letter, value in (
            *(("A", job["id"]), ("T", job["state"]), ("N", ",".join(job["on"]))),
            *(("r", reason), ("j", job["name"])),
        ):
            row = row.replace(f"%{letter}", value)
        print(row)
    return 0


def scancel(words: list[str], options: dict[str, str]) -> int:
    id_, _, step = words[0].partition(".")
    with queue() as content:
        job = content["jobs"].get(id_, {"state": ""})
        if job["state"] not in ACTIVE:
            return _fail(f"Kill job error on job id {words[0]}: Invalid job id specified")
        if "signal" not in options:
            if job["state"] == "PENDING":
                job["state"] = "CANCELLED"
            else:
                _terminate(job, "CANCELLED")
            schedule(content)
            return 0
        if job["state"] == "PENDING":
            return _fail(f"Kill job error on job id {words[0]}: Job is pending execution")
        number = signal.Signals[f"SIG{options['signal']}"]
        if "batch" in options:
            os.kill(job["pid"], number)
        else:
            # Without a step, Slurm ends the job itself.
            assert step == "0" or "full" in options, words
            _signal(id_, number, _is_step if step else lambda _: True)
    return 0


def scontrol(words: list[str], options: dict[str, str]) -> int:
    if words[:2] == ["show", "hostnames"]:
        print("\n".join(words[2].split(",")))
        return 0
    with queue() as content:
        if words[0] == "update":
            given = dict(word.split("=", 1) for word in words[1:])
            if given.get("state") == "drain":
                content.setdefault("drained", {})[given["nodename"]] = given["reason"]
            elif given.get("state") == "resume" and drained(content, given["nodename"]):
                del content["drained"][given["nodename"]]
                schedule(content)
            elif "nodename" in given:
                _change_node(content, given["nodename"], up=given["state"] == "resume")
            elif given.get("starttime") == "now":
                content["jobs"][given["jobid"]]["begin"] = 0
                schedule(content)
            else:
                content["jobs"][given["jobid"]]["requeue"] = given["requeue"] != "0"
            return 0
        if words[-1] not in content["jobs"]:
            return _fail("slurm_load_jobs error: Invalid job id specified")
        job = content["jobs"][words[-1]]
        if words[0] == "release":
            job["reason"] = "None"
            schedule(content)
            return 0
        if words[0] == "requeue":
            if not job["requeue"] or job["state"] != "RUNNING":
                return _fail("Requested operation is presently disabled for job " + job["id"])
            _requeue(job)
            return 0
    assert words[:2] == ["show", "job"], words
    print(
        f"JobId={job['id']} JobName={job['name']} JobState={job['state']} "
        f"Reason={job['reason']} Requeue={int(job['requeue'])} Restarts={job['restarts']}"
    )
    return 0


def _change_node(content: dict[str, Any], name: str, *, up: bool) -> None:
    """A node that goes down takes its jobs with it; if it is their first, without a word."""
    content["nodes"][name] = up
    for job in content["jobs"].values():
        if not up and job["state"] == "RUNNING" and name in job["on"]:
            if job["on"][0] == name:
                _signal(job["id"], signal.SIGKILL, lambda _: True)
            job["reason"] = "NodeDown"
            if job["requeue"]:
                _requeue(job)
            else:
                _terminate(job, "NODE_FAIL")
    schedule(content)


def sinfo(words: list[str], options: dict[str, str]) -> int:
    content = read()
    if "drain" in options["states"]:
        for name, up in content["nodes"].items():
            if (reason := drained(content, name)) or ("down" in options["states"] and not up):
                state, why = ("drain", reason) if reason else ("down*", "Not responding")
                row = options["format"].replace("%t", state).replace("%E", why)
                print(row.replace("%N", name))
        return 0
    if options["states"] == "idle":
        used = {name for job in content["jobs"].values() for name in job["on"]}
        idle = (name for name, up in content["nodes"].items() if up and name not in used)
        print("\n".join(name for name in idle if not drained(content, name)))
        return 0
    assert options["states"] == "down,no_respond", options
    for name, up in content["nodes"].items():
        if not up and name in options["nodes"].split(","):
            print(name)
    return 0


def _fail(text: str) -> int:
    print(f"{sys.argv[0]}: error: {text}", file=sys.stderr)
    return 1


COMMANDS = {
    "sbatch": sbatch,
    "squeue": squeue,
    "scancel": scancel,
    "scontrol": scontrol,
    "sinfo": sinfo,
}


def main() -> int:
    name, *words = sys.argv
    if name not in COMMANDS:
        return stepd(words[0])
    if (ROOT / "down").exists():
        return _fail("Unable to contact slurm controller (connect failure)")
    options = [word.lstrip("-").partition("=") for word in words if word.startswith("-")]
    return COMMANDS[name](
        [word for word in words if not word.startswith("-")],
        {option: value for option, _, value in options},
    )


if __name__ == "__main__":
    sys.exit(main())
