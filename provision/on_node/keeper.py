"""Keeps the nodes of an expired cluster for results that are nowhere else, and ends one that is done.

Runs as root on every node, twice a minute; only the head acts. A node powers off at its deadline unless the
head has touched its ``hold`` file in the last three minutes, and at its latest end in any case: expiry.sh.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from .unfetched import RUNNING, STALLED, WAITING, QueueError, find_loss, list_queue, modified, read

STATE = Path("/run/spr-cluster")
HOME = Path("/home/ubuntu")
FIRST_BOOT = Path("/var/lib/cloud/instance/spr-cluster-fresh")
"""Written at the machine's first boot only, by fresh.sh."""
_EARLY_S = 120
# A metal worker takes up to 20 minutes to come back.
_REBOOT_S = 1800
# The job's own push comes first.
_PUSH_AFTER_S, _PUSH_PAUSE_S, _LONGEST_PAUSE_S = 45, 60, 900
_PUSH_LIMIT_S = 1800
_SUBMITTED_S = 600
_PYTHON = "/opt/spr-cluster/venv/bin/python"  # as in provision/install.py
HEAD, ALL = "head", "all"
ENDED_JOBS = Path("/var/spool/spr-cluster-slurm/jobs.txt")
"""Slurm's record on the head of the jobs that ended."""
_ENDED = re.compile(r"JobId=(\S+) .*? Name=(\S+) JobState=(\S+) ")
_KILLED = 137
_AS_USER = ("--uid=ubuntu", f"--setenv=HOME={HOME}", "-p", "EnvironmentFile=-/etc/environment")
"""Like a session: systemd does not set the environment that user data writes."""
_NULL = subprocess.DEVNULL


class Job(NamedTuple):
    """A job's folder; ``queued`` is its state in the queue, or "". Times are in seconds since 1970.

    ``stalled`` is since when it waits for lost nodes, or 0.

    ``bucket`` is the URL of its place in S3, if it is not completely there.
    """

    name: str
    queued: str = ""
    loss: str = ""
    ended: float = 0.0
    bucket: str = ""
    gathers: bool = False
    limited: bool = False
    down_when_done: bool = False
    stalled: float = 0.0


class Facts(NamedTuple):
    """What the keeper knows; ``queue`` is false if Slurm does not answer."""

    now: float
    expires: float
    latest: float
    grace: float
    jobs: tuple[Job, ...] = ()
    queue: bool = True
    first_boot: float = 0.0


class Decision(NamedTuple):
    """The nodes to hold (``head``, ``all``, or ""), until when, and why; ``off``: why to power all off."""

    hold: str = ""
    why: str = ""
    until: float = 0.0
    off: str = ""


def decide(facts: Facts) -> Decision:
    """Return what to do now. Pure."""
    if off := _is_done(facts):
        return Decision(off=off)
    if facts.now < facts.expires - _EARLY_S or facts.now >= facts.latest:
        return Decision()
    for job in facts.jobs:
        # `repair` may not come: nodes that only wait for it, or for a reboot, stay for the grace period.
        least = max(facts.expires, job.stalled) + max(facts.grace, _REBOOT_S)
        stays = least if job.stalled else facts.latest
        if job.limited and job.queued and facts.now < stays:
            why = f"job {job.name} is {job.queued}"
            return Decision(ALL, why, min(stays, facts.latest))
    ends = [job.ended for job in facts.jobs if job.limited]
    until = min(max(facts.expires, *ends, 0) + facts.grace, facts.latest)
    nodes, why = choose_held(facts.jobs)
    return Decision(nodes, why, until) if nodes and facts.now < until else Decision()


def choose_held(jobs: Iterable[Job]) -> tuple[str, str]:
    """Return which nodes have something that is nowhere else (``head``, ``all``, or ""), and what. Pure."""
    kept = [job for job in jobs if job.loss or job.queued == RUNNING]
    whole = any(job.gathers or job.queued == RUNNING for job in kept)
    what = ", ".join(f"the {job.loss or 'output'} of {job.name}" for job in kept)
    return (ALL if whole else HEAD, f"only on the nodes: {what}") if kept else ("", "")


def _is_done(facts: Facts) -> str:
    """Return why the cluster is done; "" if it is not: anything is queued, or would be lost."""
    if not facts.queue or any(job.queued or job.loss for job in facts.jobs):
        return ""
    # A job that an image or a lost head left behind has ended before this machine began.
    done = [job for job in facts.jobs if job.down_when_done and job.ended > facts.first_boot]
    return f"job {done[-1].name} is done (--down-when-done)" if done else ""


def next_push(tried: int, last: float, ended: float) -> float:
    """Return when to push a job again that has been tried some times, the last time at ``last``. Pure."""
    if not tried:
        return ended + _PUSH_AFTER_S
    return last + min(_PUSH_PAUSE_S * 2.0 ** (tried - 1), _LONGEST_PAUSE_S)


def main() -> None:
    nodes = read(HOME / "hosts").split()
    ends = (_ask(["sh", str(STATE / "expiry"), "show"]) or "").split()
    if not _on_head() or len(ends) != 3:
        return
    expires, latest, grace = map(float, ends)
    keeper, now = Keeper(nodes[1:]), time.time()
    if os.environ.get("SPR_KEEPER") == "held":  # idle.sh asks, and decides
        print(choose_held(gather(now, expires, latest, grace).jobs)[0] or "nothing")
        return
    for left in (HOME / "spr-jobs").glob("*/environment.json.*"):
        if now - modified(left) > _SUBMITTED_S:
            left.unlink()
    finish_lost_jobs()
    # What would be lost takes a look at every file, which must not cost a job its time.
    if now >= expires - _EARLY_S or keeper.is_holding or any(map(_is_pending, _list_jobs())):
        keeper.act(gather(now, expires, latest, grace))


def _list_jobs() -> list[Path]:
    jobs = (path for path in (HOME / "spr-jobs").glob("[!.]*") if path.is_dir())
    return sorted(jobs, key=lambda path: path.name)


def finish_lost_jobs() -> None:
    """Finish each job that Slurm ended, by a kill or the loss of a node, before it recorded its end."""
    first_boot = modified(FIRST_BOOT)
    begun = [
        job
        for job in _list_jobs()
        # One that came with an image ended elsewhere.
        if modified(job / "begin.json") > first_boot and _may_run(job)
    ]
    ended = {name: (number, state) for number, name, state in _ENDED.findall(read(ENDED_JOBS))}
    for job in begun:
        with suppress(QueueError, ValueError, LookupError):
            # Slurm's record may be of an attempt before the present one.
            if job.name in ended and job.name not in list_queue():
                # Read last: a job that is submitted again has none.
                begin = json.loads(read(job / "begin.json"))
                _ask(render_finish(job.name, *ended[job.name], begin))


def render_finish(name: str, number: str, state: str, begin: dict[str, Any]) -> list[str]:
    """Return the command that starts a job's supervisor again, to store its results and record its end.

    It runs on the job's first node, which has the results, or on the head if that node does not answer.
    It fails if it is running.
    """
    folder, nodes = HOME / "spr-jobs" / name, begin["nodes"]
    known = (
        f"SLURM_JOB_ID={number} SLURM_RESTART_COUNT={int(begin['attempt']) - 1} SPR_ENDED={state}"
    )
    run = f"env {known} SLURM_JOB_NODELIST=%s bash {folder}/run.sh {_KILLED}"
    there, here = run % ",".join(nodes), run % "node0"
    script = f"ssh -o ConnectTimeout=10 {nodes[0]} {shlex.quote(there)}; [ $? != 255 ] || {here}"
    unit = [f"--unit=spr-cluster-end-{name}", *_AS_USER]
    return ["systemd-run", "--quiet", "--collect", *unit, "sh", "-c", script]


def _is_pending(job: Path) -> bool:
    """Whether a job has ended with something left to do."""
    ended = modified(job / "end.json")
    is_pushed = modified(job / "pushed.json") >= ended or not (job / "log").exists()
    return ended > 0 and (_asks(job, "down_when_done") or bool(_bucket(job) and not is_pushed))


def _bucket(job: Path) -> str:
    """Return a job's place in S3, as last submitted (`--resume` may change it); "" for none."""
    below = _read_spec(job, "storage").get("bucket")
    return f"{below}/{job.name}" if below else ""


def _asks(job: Path, option: str) -> bool:
    """Whether a job was submitted with an option about its end, and was not canceled."""
    return not (job / "cancelled").exists() and bool(_read_spec(job, "ending").get(option))


def _read_spec(job: Path, part: str) -> dict[str, Any]:
    """Return a part of a job's value, as last submitted; {} if it never was."""
    with suppress(ValueError, LookupError, TypeError):
        return dict(json.loads(read(job / "launch.json"))["spec"][part])
    return {}


def gather(now: float, expires: float, latest: float, grace: float) -> Facts:
    """Return the facts of this machine."""
    paths, answers = _list_jobs(), True
    try:
        queue = list_queue()
    except QueueError:
        answers = False
        # Any job that has not ended may be running.
        queue = {path.name: RUNNING for path in paths if _may_run(path)}
    jobs = tuple(_describe(path, queue.get(path.name, "")) for path in paths)
    return Facts(now, expires, latest, grace, jobs, answers, modified(FIRST_BOOT))


def _may_run(job: Path) -> bool:
    """Whether a job was submitted and has no end."""
    has_ended = any((job / name).exists() for name in ("cancelled", "end.json"))
    return (job / "run.sh").exists() and not has_ended


def _describe(job: Path, queued: str) -> Job:
    record: dict[str, Any] = {}
    with suppress(ValueError):
        record = json.loads(read(job / "job.json"))
    loss, bucket = find_loss(job), _bucket(job)
    ended, pushed = modified(job / "end.json"), modified(job / "pushed.json")
    if not (queued or ended or (job / "cancelled").exists()):
        # A command on the laptop is submitting it, unless that was interrupted.
        queued = "new" if time.time() - modified(job) < _SUBMITTED_S else ""
    if not (loss or (job / "log").exists()):
        bucket = ""  # a lost head had the job's files: its bucket has more than this one
    elif bucket and ended and not (loss or pushed or (job / "fetched").exists()):
        loss = "log"
    return Job(
        job.name,
        queued,
        loss,
        0.0 if queued else ended,
        bucket if pushed < ended else "",
        bool(record.get("gather_output")),
        _asks(job, "max_time_s"),
        _asks(job, "down_when_done"),
    )


class Keeper:
    """The head's actions, and what it did before, which is in memory only."""

    def __init__(self, workers: list[str]) -> None:
        self.workers, self._path = workers, STATE / "keeper.json"
        self._past: dict[str, Any] = {}
        with suppress(ValueError):
            self._past = json.loads(read(self._path))

    @property
    def is_holding(self) -> bool:
        """Whether it held nodes the last time: `extend` may have moved the deadline since."""
        return bool(self._past.get("held"))

    def act(self, facts: Facts) -> None:
        """Decide, and do it."""
        facts = self._note_stalls(facts)
        decision = decide(facts)
        self._push(facts)
        held = self._past.get("held")
        if decision.hold:
            (STATE / "hold").touch()
            if decision.hold == ALL:
                self._on_workers(f"sudo -n touch {STATE}/hold")
            if held != decision.why:
                until = time.strftime("%H:%M UTC", time.gmtime(decision.until))
                self._record("held", f"at most until {until}: {decision.why}")
        elif held:
            self._on_workers(f"sudo -n rm -f {STATE}/hold")
            (STATE / "hold").unlink(missing_ok=True)
            self._record("released", "nothing is only on the nodes, or their time is over")
        if held and not decision.hold and facts.now >= facts.expires:
            self._record("powering off", "the time to live is over")
        self._past["held"] = decision.why if decision.hold else ""
        self._save()
        # Another job may have been submitted since.
        if decision.off and not list_queue():
            self._record("powering off", decision.off)
            self._on_workers("sudo -n systemctl poweroff")
            os.sync()
            _ask(["systemctl", "poweroff"])

    def _note_stalls(self, facts: Facts) -> Facts:
        """Return the facts with since when jobs wait for lost nodes."""
        before: dict[str, float] = self._past.get("stalls", {})
        states = {job.name: job.queued for job in facts.jobs}
        is_idle = RUNNING not in states.values()
        if facts.queue:
            if not is_idle:
                self._past["ran"] = facts.now
            # Slurm may fail, or change its reason: the wait ends with the job, or when one runs.
            self._past["stalls"] = {
                name: before.get(name, facts.now)
                for name, state in states.items()
                if state == STALLED or (state == WAITING and name in before and is_idle)
            }
        since: dict[str, float] = dict(self._past.get("stalls", {}))
        if STALLED in states.values() and is_idle:
            # Slurm names lost nodes as the reason of the first job only.
            first = max(min(since.values()), self._past.get("ran", 0.0))
            since.update({name: first for name, state in states.items() if state == WAITING})
        jobs = (job._replace(stalled=since.get(job.name, 0.0)) for job in facts.jobs)
        return facts._replace(jobs=tuple(jobs))

    def _push(self, facts: Facts) -> None:
        """Start the push of ended jobs that are not in their bucket, each beside this program."""
        tries = self._past.setdefault("pushes", {})
        for job in facts.jobs:
            tried, last = tries.get(job.name, (0, 0.0))
            if job.queued or not (job.ended and job.bucket):
                continue
            if facts.now < next_push(tried, last, job.ended):
                continue
            if _ask(render_push(job)) is not None:
                tries[job.name] = (tried + 1, facts.now)
                self._record("pushed again", f"job {job.name}, try {tried + 1}")

    def _on_workers(self, command: str) -> None:
        def tell(node: str) -> None:
            # systemd's user is root, whose SSH knows no node.
            ssh = ["ssh", "-o", "ConnectTimeout=10", "-o", "BatchMode=yes", node, command]
            _ask(["runuser", "-u", "ubuntu", "--", *ssh])

        with ThreadPoolExecutor(64) as pool:
            list(pool.map(tell, self.workers))

    def _record(self, event: str, text: str) -> None:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        path = HOME / "spr-jobs/.events.jsonl"
        try:
            with path.open("a") as file:
                file.write(json.dumps({"time": now, "event": event, "text": text}) + "\n")
            path.chmod(0o644)
        except OSError as error:
            print(f"<4>{error}", file=sys.stderr)
        print(f"<5>{event}: {text}")

    def _save(self) -> None:
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(self._past))
        new.replace(self._path)


def render_push(job: Job) -> list[str]:
    """Return the command that starts the push of a job as its user; it fails if that is running."""
    folder = HOME / "spr-jobs" / job.name
    unit = [f"--unit=spr-cluster-push-{job.name}", *_AS_USER]
    unit += ["-p", f"RuntimeMaxSec={_PUSH_LIMIT_S}", f"--setenv=PYTHONPATH={folder}/code"]
    push = [_PYTHON, "-m", "worker.storage.push", "all", str(folder), job.bucket]
    return ["systemd-run", "--quiet", "--collect", *unit, *push]


def _on_head() -> bool:
    """Whether node0, which /etc/hosts names once the cluster is connected, is this machine."""
    for line in read(Path("/etc/hosts")).splitlines():
        address, *names = line.split("#")[0].split() or [""]
        if "node0" in names:
            try:
                with socket.socket() as probe:
                    probe.bind((address, 0))
                return True
            except OSError:
                return False
    return False


def _ask(argv: list[str]) -> str | None:
    """Return what a command prints; ``None`` if it fails."""
    try:
        done = subprocess.run(
            argv, stdin=_NULL, stdout=subprocess.PIPE, stderr=_NULL, timeout=30, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return None if done.returncode else done.stdout.decode(errors="replace")
