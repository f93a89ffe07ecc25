"""The scripts that end a machine or a cluster, run for real with the system's commands replaced."""

from __future__ import annotations

import os
import time
from datetime import datetime, timedelta, timezone

import pytest

from infra.lifetime import Lifetime
from provision.on_node import keeper
from provision.user_data import EXPIRES_FILE, IDLE_FILE, render_expiry_script, render_idle_script
from tests.provision.machine import Machine

OFF = "systemctl poweroff"


def in_(seconds: float, latest: float | None = None) -> Lifetime:
    now = datetime.now(timezone(timedelta(hours=2)))
    expires = now + timedelta(seconds=seconds)
    last = expires if latest is None else now + timedelta(seconds=latest)
    return Lifetime(expires, last, timedelta(minutes=30))


def epoch(seconds: float) -> int:
    return int(time.time() + seconds)


@pytest.fixture
def quiet(machine: Machine) -> Machine:
    """A connected head that nobody uses: 172.31.0.4, with one worker."""
    machine.replace("systemctl")
    machine.replace("getent", "echo 172.31.0.4 node0 ip-172-31-0-4")
    machine.replace("ip", "echo 2: ens5 inet 172.31.0.4/20")
    machine.replace("pgrep", "exit 1")
    machine.replace("squeue")
    machine.replace("ss")
    machine.replace("runuser", 'shift 3; exec "$@"')
    machine.replace(
        "ssh", f'while [[ "$1" == -* ]]; do shift 2; done; cat {machine.folder}/told-$1'
    )
    (machine.folder / "told-node1").touch()
    machine.path("/home/ubuntu").mkdir()
    machine.path("/home/ubuntu/hosts").write_text("node0\nnode1\n")
    machine.path("/run/spr-cluster").mkdir()
    used(machine, ago_s=3700)
    return machine


def used(machine: Machine, ago_s: float) -> None:
    path = machine.path("/run/spr-cluster/last-busy")
    path.touch()
    os.utime(path, (time.time() - ago_s,) * 2)


def idle_for(machine: Machine) -> float:
    return time.time() - machine.path("/run/spr-cluster/last-busy").stat().st_mtime


def check_expiry(
    machine: Machine, launched_until: Lifetime, checked: tuple[float, float] | None = (30, 400)
) -> list[str]:
    """Check twice; ``checked`` is how long ago the last check was, and the first one of its row."""
    machine.replace("systemctl")
    checks = machine.path("/run/spr-cluster/checks")
    checks.parent.mkdir(exist_ok=True)
    if not checks.is_dir():
        checks.write_text(
            "{} {}\n".format(*(epoch(-ago_s) for ago_s in checked)) if checked else ""
        )
    for program in ("sh", "bash"):
        assert machine.shell(render_expiry_script(launched_until), program=program).returncode == 0
    return machine.calls


def check_idle(machine: Machine, timeout: str = "3600\n") -> list[str]:
    """One look at whether the cluster is unused for an hour; returns what was done about it."""
    machine.path(IDLE_FILE).write_text(timeout)
    done = machine.shell(render_idle_script(), program="sh")
    assert done.returncode == 0, done.stderr
    return [call for call in machine.calls if call.startswith(("systemctl", "ssh"))]


TEN = "9" * 30
_BROKEN = ("", "\n", "never\n", "-1\n", "12\n", f"{TEN}\n", "0 0\n", "1900000000\n")


@pytest.mark.parametrize(
    ("launch", "file", "held_ago_s", "ends"),
    [
        # However late the check is.
        *(((left,), None, None, left < 0) for left in (3600, -1, -(10**6))),
        # `extend` overrides the expiry of the launch, and a broken file leaves it.
        ((-3600,), (3600, 3600), None, False),
        ((3600,), (-1, -1), None, True),
        *(((left,), text, None, left < 0) for text in _BROKEN for left in (60, -1)),
        # The head holds an expired machine until its latest end.
        ((-10, 60), None, None, True),
        ((-10, 60), None, 170, False),
        ((-10, 60), None, 190, True),
        ((-10, -1), None, 0, True),
        ((-10, -5), None, 0, True),
        ((-60, -30), (-60, 60), 0, False),
        ((-60, 60), (-60, -30), 0, True),
    ],
)
def test_a_machine_shuts_down_when_it_has_expired_and_is_not_held(
    machine: Machine,
    launch: tuple[float, ...],
    file: tuple[float, float] | str | None,
    held_ago_s: float | None,
    ends: bool,
) -> None:
    hold(machine, held_ago_s)
    if file is not None:
        times = file if isinstance(file, str) else "{}\n{} 60\n".format(*map(epoch, file))
        machine.path(EXPIRES_FILE).write_text(times)

    assert check_expiry(machine, in_(*launch)) == ([OFF, OFF] if ends else [])


@pytest.mark.parametrize(("command", "latest"), [("date", None), ("stat", 60)])
def test_a_machine_that_does_not_know_the_time_or_the_age_of_a_hold_keeps_running(
    machine: Machine, command: str, latest: float | None
) -> None:
    hold(machine, 9999)
    machine.replace(command, "exit 1")

    assert OFF not in check_expiry(machine, in_(-10, latest))


@pytest.mark.parametrize(
    ("checked", "expired_ago_s", "ends"),
    [
        (None, 400, False),  # also in a container, whose uptime is its host's
        ((30, 290), 400, False),
        ((30, 300), 400, True),
        ((30, 290), 160, True),
        ((30, 290), 180, False),  # just before the deadline
        ((190, 9000), 400, False),  # it was suspended
        ((-60, 9000), 400, False),  # its clock was set back
    ],
)
def test_a_machine_that_was_just_started_or_suspended_waits_for_its_keeper(
    machine: Machine, checked: tuple[float, float] | None, expired_ago_s: float, *, ends: bool
) -> None:
    found = check_expiry(machine, in_(-expired_ago_s, 60), checked)
    assert found == ([OFF, OFF] if ends else [])


def test_a_new_machine_does_not_wait(machine: Machine) -> None:
    first_boot = machine.path(str(keeper.FIRST_BOOT))
    first_boot.parent.mkdir(parents=True, exist_ok=True)
    first_boot.touch()

    assert check_expiry(machine, in_(-10, 60), None) == [OFF, OFF]


@pytest.mark.parametrize("later_s", [310, 1000])
def test_a_machine_too_busy_for_regular_checks_ends_after_its_latest_end(
    machine: Machine, later_s: int
) -> None:
    latest = in_(-400, -310)
    assert check_expiry(machine, latest, (190, 9000)) == []
    marker = machine.path(f"{EXPIRES_FILE}.waited")
    os.utime(marker, (time.time() - later_s,) * 2)
    assert check_expiry(machine, latest, (190, 9000)) == [OFF, OFF]


def test_a_machine_that_can_not_note_its_checks_shuts_down(machine: Machine) -> None:
    machine.path("/run/spr-cluster/checks").mkdir(parents=True)

    assert check_expiry(machine, in_(-10, 60)) == [OFF, OFF]


def test_a_machine_that_keeps_rebooting_after_its_latest_end_waits_once(machine: Machine) -> None:
    random = machine.path("/proc/sys/kernel/random")
    random.mkdir(parents=True)
    latest = in_(-10, -5)
    for boot, ends in ((1, False), (1, False), (2, True)):
        (random / "boot_id").write_text(f"{boot}\n")
        assert check_expiry(machine, latest, None) == ([OFF, OFF] if ends else [])
    # Started again by hand, after a while.
    marker = machine.path(f"{EXPIRES_FILE}.waited")
    os.utime(marker, (time.time() - 1000,) * 2)
    assert check_expiry(machine, latest, None) == [OFF, OFF]
    # `extend` has set a later end, which has passed as well; or it has not come yet.
    for later in (in_(-10, -3), in_(-10, 60), in_(-10, 60)):
        assert check_expiry(machine, later, None) == [OFF, OFF]


def test_a_refused_shutdown_is_forced(machine: Machine) -> None:
    machine.replace("systemctl", '[ "$*" != poweroff ]')

    machine.shell(render_expiry_script(in_(-1)))

    assert machine.calls == [OFF, f"{OFF} --force --force"]


def hold(machine: Machine, ago_s: float | None) -> None:
    path = machine.path("/run/spr-cluster/hold")
    path.parent.mkdir()
    if ago_s is not None:
        path.touch()
        os.utime(path, (time.time() - ago_s,) * 2)


def test_an_idle_cluster_shuts_down_workers_first(quiet: Machine) -> None:
    calls = check_idle(quiet)

    ask, tell, own = calls
    assert ask.startswith("ssh -o ConnectTimeout=10 node1 find ")
    assert "-newermt '-3600 seconds'" in ask
    assert tell == "ssh -o ConnectTimeout=10 node1 sudo systemctl poweroff"
    assert own == OFF
    assert not any("node0" in call for call in calls)
    # A single node has no other node to ask.
    quiet.path("/home/ubuntu/hosts").write_text("node0\n")
    assert check_idle(quiet)[len(calls) :] == [OFF]


@pytest.mark.parametrize(("held", "told"), [("head", True), ("all", False)])
def test_what_is_only_on_idle_nodes_keeps_them_for_the_grace_period(
    quiet: Machine, held: str, *, told: bool
) -> None:
    state = quiet.path("/run/spr-cluster")
    (state / "keeper").write_text(f'[ "$SPR_KEEPER" = held ] && echo {held}\n')
    (state / "expiry").write_text("echo 2000000000 2000000000 1800\n")

    calls = check_idle(quiet)

    assert [call for call in calls if "poweroff" in call] == (
        ["ssh -o ConnectTimeout=10 node1 sudo systemctl poweroff"] * told
    )
    used(quiet, ago_s=3700 + 1800)
    assert check_idle(quiet)[-1] == OFF
    used(quiet, ago_s=3700)
    (state / "keeper").write_text("echo nothing\n")
    assert check_idle(quiet)[-1] == OFF


def test_a_worker_that_has_become_the_head_was_not_idle(quiet: Machine) -> None:
    quiet.path("/run/spr-cluster/last-head").touch()

    assert check_idle(quiet) == []
    assert idle_for(quiet) < 60
    used(quiet, ago_s=3700)
    assert check_idle(quiet)[-1] == OFF


def counts_as_use(machine: Machine) -> bool:
    """Whether a look finds the cluster in use; otherwise, it powers the cluster off."""
    ends = check_idle(machine)[-1:] == [OFF]
    assert ends is (idle_for(machine) >= 60)
    return not ends


def test_the_timeout_begins_with_the_last_use_or_the_first_look(quiet: Machine) -> None:
    used(quiet, ago_s=3500)
    assert check_idle(quiet) == []
    assert idle_for(quiet) > 3000
    quiet.path("/run/spr-cluster/last-busy").unlink()
    assert counts_as_use(quiet)


@pytest.mark.parametrize("timeout", ["0\n", "", "soon\n"])
def test_without_a_timeout_a_cluster_is_never_idle(quiet: Machine, timeout: str) -> None:
    assert check_idle(quiet, timeout) == []
    assert idle_for(quiet) < 60, "one that is set later begins then"


def test_a_session_on_a_worker_is_use(quiet: Machine) -> None:
    (quiet.folder / "told-node1").write_text("/run/spr-cluster/last-busy\n")

    calls = check_idle(quiet)

    assert [call.split()[4] for call in calls] == ["find"]


@pytest.mark.parametrize(
    ("answers", "heard_ago_s", "ends"),
    [(True, 9000, False), (False, 3000, False), (False, 9000, True), (False, None, False)],
)
def test_a_worker_without_a_head_shuts_down_after_the_timeout(
    quiet: Machine, answers: bool, heard_ago_s: int | None, ends: bool
) -> None:
    lose_head(quiet, heard_ago_s, answers=answers)

    assert check_idle(quiet) == ([OFF] if ends else [])
    assert not [call for call in quiet.calls if call.startswith("squeue")], "only the head knows"
    if answers:
        heard = quiet.path("/run/spr-cluster/last-head")
        assert time.time() - heard.stat().st_mtime < 60


def lose_head(worker: Machine, heard_ago_s: int | None, *, answers: bool = False) -> None:
    worker.replace("ip", "")
    worker.replace("bash", "exit 0" if answers else "exit 1")
    heard = worker.path("/run/spr-cluster/last-head")
    if heard_ago_s is not None:
        heard.touch()
        os.utime(heard, (time.time() - heard_ago_s,) * 2)


def keep_job(machine: Machine, name: str, **files: str) -> None:
    """Put the files of a job with retries into its folder."""
    folder = machine.path(f"/home/ubuntu/spr-jobs/{name}")
    folder.mkdir(parents=True)
    (folder / "run.sh").write_text("#!/bin/bash\n#SBATCH --requeue\n")
    for file, text in files.items():
        (folder / file).write_text(text)


# With cgroups version 2, as on Ubuntu 24.04, it holds the control group of the jobs to come:
# https://github.com/SchedMD/slurm/blob/slurm-23-11-4-1/src/plugins/cgroup/v2/cgroup_v2.c#L690
_STEPD_OF_SLURMD = "655 /usr/sbin/slurmstepd infinity"
_PEERS = {
    **dict.fromkeys(("203.0.113.9:50022", "172.31.0.44:50022"), True),
    **dict.fromkeys(("[::ffff:203.0.113.9]:50022", "[2001:db8::1]:9"), True),
    # The head's own connections.
    **dict.fromkeys(("172.31.0.4:50022", "[::ffff:172.31.0.4]:50022"), False),
}
_DOWN = (
    "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions"
)
_QUEUES = {
    "": False,
    "RUNNING|None|mine": True,
    "COMPLETING|None|mine": True,
    "PENDING|Resources|mine": True,
    "PENDING|BeginTime|mine": True,
    "PENDING|None|mine": True,
    "PENDING|JobHeldUser|begun": False,
    "PENDING|DependencyNeverSatisfied|new": False,
    "FAILED|Resources|mine": False,
    "PENDING|JobHeldUser|mine\nPENDING|Priority|mine": True,
    # It waits for `repair`.
    "PENDING|ReqNodeNotAvail, UnavailableNodes:node1|new": True,
    f"PENDING|{_DOWN}|new": True,
    f"PENDING|JobHeldUser|new\nPENDING|{_DOWN}|begun": True,
    "PENDING|PartitionNodeLimit|begun": True,
    "PENDING|PartitionConfig|begun": True,
    # It never fitted, or is not ours.
    "PENDING|PartitionNodeLimit|new": False,
    f"PENDING|{_DOWN}|mine": False,
    f"PENDING|{_DOWN}|": False,
}


def show_steps(*processes: str) -> str:
    lines = "\n".join((_STEPD_OF_SLURMD, *processes))
    return f'[ "$*" = "-ax slurmstepd" ] && echo "{lines}"'


@pytest.mark.parametrize(
    ("command", "answer", "is_use"),
    [
        ("ssh", "exit 255", False),  # an unreachable worker
        ("getent", "exit 2", True),  # the nodes are not connected yet
        ("ss", "exit 1", True),
        *(("ss", f"echo '0 0 172.31.0.4:22 {peer}'", is_use) for peer, is_use in _PEERS.items()),
        ("pgrep", show_steps(), False),
        ("pgrep", show_steps("812 slurmstepd: [7.batch]"), True),
        ("squeue", "echo 'slurm_load_jobs error: RUNNING None' >&2; exit 1", False),
        *(
            ("squeue", f"[ \"$*\" = '-h -o %T|%r|%j' ] && echo '{jobs}'", is_use)
            for jobs, is_use in _QUEUES.items()
        ),
    ],
)
def test_what_counts_as_use(quiet: Machine, command: str, answer: str, is_use: bool) -> None:
    keep_job(quiet, "new")
    keep_job(quiet, "begun", **{"begin.json": "{}"})
    quiet.replace(command, answer)

    assert counts_as_use(quiet) is is_use


def test_a_job_is_use_on_a_worker_as_well(quiet: Machine) -> None:
    quiet.replace("pgrep", show_steps("812 slurmstepd: [7.batch]"))
    quiet.replace("ip", "")

    assert counts_as_use(quiet)


@pytest.mark.parametrize(
    ("files", "waits"),
    [
        ({}, True),
        ({"end.json": "{}"}, False),
        ({"cancelled": ""}, False),
        ({"run.sh": "#SBATCH --no-requeue\n"}, False),
    ],
)
def test_a_worker_that_has_a_job_for_the_next_head_waits_for_repair(
    quiet: Machine, files: dict[str, str], waits: bool
) -> None:
    keep_job(quiet, "ended", **{"end.json": "{}"})
    keep_job(quiet, "other", **files)
    lose_head(quiet, 9000)

    assert counts_as_use(quiet) is waits
