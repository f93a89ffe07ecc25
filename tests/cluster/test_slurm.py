"""Slurm's configuration, as a golden file, and its scripts, run for real in a folder."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest

from cluster.nodes import Node
from cluster.slurm.configuration import (
    FOLDER,
    order_cores,
    render_slurm_conf,
    slurm_files,
    usable_memory,
)
from provision.facts import HostFacts, parse_facts
from tests.cluster.test_ssh_mesh import NODES
from tests.fakes import facts_answer
from tests.golden import check_golden
from tests.jobs.places.topologies import interleaved, machine
from tests.provision.machine import Machine

GOLDEN = Path(__file__).with_name("golden")
_HYPERTHREADS = "\n".join(f"{cpu},{cpu % 4},{cpu % 4 // 2},0" for cpu in range(8))


def facts_of(nodes: Sequence[Node] = NODES, **processor: str) -> dict[str, HostFacts]:
    names = {node.name: f"ip-{node.private_ip.replace('.', '-')}" for node in nodes}
    return {n: parse_facts(facts_answer(hostname=h, **processor)) for n, h in names.items()}


def test_slurm_conf() -> None:
    facts = facts_of(topology=_HYPERTHREADS, allowed="0-7")
    text = render_slurm_conf("bert", NODES, facts)
    check_golden(GOLDEN / "slurm.conf", text)
    assert not re.search("(?m)=([a-z]+/)?none$", text), "Slurm 23.11 has no such plugins"
    # A job that does not ask for memory gets its cores' share on every node.
    mixed = {**facts_of(), "node1": machine(8), "node2": machine(4)}
    assert usable_memory(mixed["node1"]) == 489798
    assert f" DefMemPerCPU={489798 // 8} " in render_slurm_conf("bert", NODES, mixed)
    first, second = (slurm_files("bert", NODES, facts_of()) for _ in range(2))
    key = f"{FOLDER}/munge.key"
    assert first.pop(key) != second.pop(key), "every connection has a new key"
    assert first == second


@pytest.mark.parametrize(
    ("allowed", "shape"),
    [
        ("0-7", "CPUs=4 Sockets=2 CoresPerSocket=2"),
        ("0-3", "CPUs=4 Sockets=2 CoresPerSocket=2"),
        ("1", "CPUs=1 Sockets=1 CoresPerSocket=1"),
        # One core with both threads, and one with one.
        ("0,1,4", "CPUs=2 Sockets=1 CoresPerSocket=2"),
        # Two cores in one socket, and one in the other: no shape that Slurm has words for.
        ("0-2", "CPUs=3 Sockets=1 CoresPerSocket=3"),
    ],
)
def test_a_node_has_the_cores_that_its_processes_may_use(allowed: str, shape: str) -> None:
    text = render_slurm_conf("bert", NODES, facts_of(topology=_HYPERTHREADS, allowed=allowed))
    assert f"NodeAddr=172.31.0.11 {shape} ThreadsPerCore=1 RealMemory=489798\n" in text


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        # The threads of a core are one core; the nodes of a socket are neighbors.
        (machine(4, sockets=2, numa=4, smt=True), [[0, 0, 4], [1, 1, 5], [2, 2, 6], [3, 3, 7]]),
        (interleaved(4), [[0, 0], [0, 2], [1, 1], [1, 3]]),
        (machine(4, numa=2, allowed="1-3"), [[0, 1], [1, 2], [1, 3]]),
        (machine(1, smt=True), [[0, 0, 1]]),
    ],
)
def test_cores_are_in_slurms_order(facts: HostFacts, expected: list[list[int]]) -> None:
    """Slurm numbers them socket by socket, and each NUMA node is a socket."""
    assert order_cores(facts) == expected


# The tests may run as any user.
_INSTALL = """
while (($#)); do
    case "$1" in -o | -g) shift 2 ;; *) kept+=("$1"); shift ;; esac
done
exec /usr/bin/install "${kept[@]}"
"""


_START = [
    "systemctl --quiet add-wants multi-user.target munge.service slurmctld.service slurmd.service",
    "systemctl restart munge",
    "systemctl restart --no-block slurmctld slurmd",
]


def configure(machine: Machine, nodes: Sequence[Node] = NODES) -> list[str]:
    """Run the node's script; return what it told systemd."""
    before = len(machine.calls)
    machine.replace("install", _INSTALL)
    machine.replace("systemctl")
    # The package's.
    machine.path("/etc/munge").mkdir(exist_ok=True)
    home = machine.path("/home/ubuntu")
    for name, content in slurm_files("bert", nodes, facts_of(nodes)).items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_bytes(content)
    script = (home / FOLDER / "configure.sh").read_text()
    script = script.replace('"$(dirname "$0")"', f'"$HOME/{FOLDER}"')
    done = machine.shell(script, program="sh")
    assert (done.returncode, done.stderr) == (0, "")
    return [call for call in machine.calls[before:] if call.startswith("systemctl")]


def test_a_node_is_configured_and_its_daemons_start_the_key_first(tmp_path: Path) -> None:
    machine = Machine.make(tmp_path)

    assert configure(machine) == _START
    key = machine.path("/etc/munge/munge.key")
    assert (key.stat().st_size, key.stat().st_mode & 0o777) == (1024, 0o400)
    assert any(call.startswith("install -o munge -g munge") for call in machine.calls)
    assert "NodeName=node2 " in machine.path("/etc/slurm/slurm.conf").read_text()
    assert os.access(machine.path("/etc/slurm/spr-cluster-epilog"), os.X_OK)
    assert machine.path("/home/ubuntu/spr-jobs").stat().st_mode & 0o777 == 0o700
    for unit in ("munge", "slurmctld", "slurmd"):
        drop_in = machine.path(f"/etc/systemd/system/{unit}.service.d/spr-cluster.conf").read_text()
        assert "Restart=always\n" in drop_in
        assert "ConditionPathExists=/etc/" in drop_in
    # https://manpages.debian.org/logind.conf.5 (RemoveIPC); tests/e2e/test_debian_13.py sees the effect.
    assert machine.path("/var/lib/systemd/linger/ubuntu").exists()
    # Only Ubuntu 20.04's Slurm has this folder.
    old = machine.path("/etc/slurm-llnl")
    assert not old.exists()
    old.mkdir()
    for _ in range(2):
        configure(machine)
        assert "ClusterName=bert\n" in (old / "slurm.conf").read_text()


def test_only_a_machine_that_takes_over_a_name_makes_slurm_forget_the_nodes(tmp_path: Path) -> None:
    """A new node1 must not be drained because the old one was."""
    machine = Machine.make(tmp_path)
    state = machine.path("/var/spool/spr-cluster-slurm/node_state")

    def configure_for(nodes: Sequence[Node]) -> list[str]:
        state.parent.mkdir(parents=True, exist_ok=True)
        state.with_name("job_state").touch()
        state.touch()
        return configure(machine, nodes)

    for nodes in (NODES[:2], NODES, NODES, NODES[:1]):
        assert configure_for(nodes) == _START
        assert state.exists()

    same_address = replace(NODES[1], instance=replace(NODES[1].instance, id="i-new"))
    for new in (replace(NODES[2], rank=1), same_address):
        configure_for(NODES)
        assert configure_for([NODES[0], new]) == ["systemctl stop slurmctld", *_START]
        assert [path.name for path in state.parent.iterdir()] == ["job_state"]


@pytest.mark.parametrize(
    ("hostname", "is_head"),
    [("ip-172-31-0-10", True), ("ip-172-31-0-1", False), ("ip-172-31-0-11", False)],
)
def test_only_the_head_runs_slurmctld(tmp_path: Path, hostname: str, is_head: bool) -> None:
    machine = Machine.make(tmp_path)
    configure(machine)
    machine.replace("hostname", f"echo {hostname}")
    unit = machine.path("/etc/systemd/system/slurmctld.service.d/spr-cluster.conf").read_text()
    (condition,) = (line for line in unit.splitlines() if line.startswith("ExecCondition="))
    command = condition.removeprefix("ExecCondition=").replace("$$", "$")

    assert (machine.shell(command).returncode == 0) is is_head


_EPILOG = resources.files("cluster").joinpath("slurm/files/epilog.sh").read_text()


# The first user has no process: the script kills all of a user's in any slurmd's control group, and those
# of the embedded cloud's nodes can be seen from here.
@pytest.mark.parametrize("uid", ["61234", "0"])
def test_the_epilog_ends_what_a_job_left_and_nothing_else(tmp_path: Path, uid: str) -> None:
    machine = Machine.make(tmp_path)
    machine.replace("setpriv", 'while [[ "$1" == --* ]]; do shift; done; exec "$@"')
    machine.replace("id", "echo 1000")
    own = f"test-{os.getpid()}"

    def start(**env: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["sleep", "60"], env={**os.environ, **env}, start_new_session=True)

    left, other, longer = (start(SLURM_JOB_ID=job) for job in (own, f"{own}-2", f"x{own}"))
    session = start()
    try:
        job = f"export SLURM_JOB_ID={own} SLURM_JOB_UID={uid}\n"
        assert machine.shell(job + _EPILOG, program="sh").returncode == 0

        # Jobs of root are left alone: its processes are the system's.
        assert (left.poll(), other.poll()) == (None if uid == "0" else -9, None)
        assert (longer.poll(), session.poll()) == (None, None)
    finally:
        for process in (left, other, longer, session):
            process.kill()
            process.wait(10)


@pytest.mark.parametrize(
    ("group", "ends"),
    [
        ("1:name=systemd:/system.slice/slurmd.service", True),
        # A job's slice is ended as a whole, and another's processes are in another.
        ("0::/spr.slice/spr-8.slice/spr-8-12.scope", False),
        # With cgroups version 2, Debian's and Ubuntu's slurmd (--enable-multiple-slurmd) names it so:
        # https://github.com/SchedMD/slurm/blob/slurm-23-11-4-1/src/plugins/cgroup/v2/cgroup_v2.c#L236
        ("0::/system.slice/node0_slurmstepd.scope/job_7/step_0/user/task_0", True),
        ("0::/user.slice/user-1000.slice/session-3.scope", False),
    ],
)
def test_the_epilog_knows_a_jobs_processes_by_their_control_group(
    tmp_path: Path, group: str, ends: bool
) -> None:
    machine = Machine.make(tmp_path)
    machine.replace("setpriv")
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            file = Path("proc", str(process.pid), "cgroup")
            (machine.path("/home/ubuntu") / file).parent.mkdir(parents=True)
            (machine.path("/home/ubuntu") / file).write_text(f"{group}\n")
            machine.replace("find", f"echo ./{file}")
            job = f"export SLURM_JOB_ID=7 SLURM_JOB_UID={os.getuid() or 1}\ncd\n"
            # A process in slurmd's group may be a neighbor's, such as the supervisor of another job.
            stepds = "1 slurmstepd: [7.batch]\n2 slurmstepd: [77.0]"
            machine.replace("pgrep", f"[ \"$1 $2\" = '-af ^slurmstepd: \\[' ] && echo '{stepds}'")
            machine.shell(job + _EPILOG, program="sh")
            assert process.poll() is None
            machine.replace("pgrep", "echo '1 slurmstepd: [7.batch]'")
            machine.shell(job + _EPILOG, program="sh")
            # The signal may take a moment.
            with suppress(subprocess.TimeoutExpired):
                process.wait(5 if ends else 0)
            assert (process.poll() == -9) is ends
        finally:
            process.kill()


def test_the_epilog_ends_the_slice_of_a_job_that_shared_its_node(tmp_path: Path) -> None:
    machine = Machine.make(tmp_path)
    for name in ("setpriv", "id", "find", "pgrep", "systemctl"):
        machine.replace(name)
    (limits := machine.path("/run/systemd/system.control/spr-7.slice.d")).mkdir(parents=True)

    def end(job: int) -> list[str]:
        machine.calls.clear()
        machine.shell(f"export SLURM_JOB_ID={job} SLURM_JOB_UID=1\n{_EPILOG}", program="sh")
        return [call for call in machine.calls if call.startswith("systemctl")]

    assert end(77) == []
    assert end(7)[-2:] == [
        "systemctl kill --signal=KILL spr-7.slice",
        "systemctl stop spr-guard-7.service spr-7.slice",
    ]
    assert not limits.exists()
    assert limits.parent.exists()


@pytest.mark.parametrize(
    ("variables", "held"),
    [
        ("SLURM_STEP_ID=0 SPR_CORES=2", True),
        ("SLURM_STEP_ID=0", True),  # of a user of Slurm without this tool
        ("SLURM_STEP_ID=0 SPR_CORES=", False),  # it has whole nodes
        ("SLURM_JOB_NAME=mine", False),  # the supervisor of one of our jobs
        ("SLURM_JOB_NAME=mine SLURM_STEP_ID=4294967291", False),
        ("SLURM_JOB_NAME=theirs", True),
    ],
)
def test_tasks_of_jobs_that_share_a_node_are_held(
    tmp_path: Path, variables: str, *, held: bool
) -> None:
    machine = Machine.make(tmp_path)
    machine.replace("python3")
    (script := machine.path("/home/ubuntu/spr-jobs/mine/run.sh")).parent.mkdir(parents=True)
    script.touch()
    text = resources.files("cluster").joinpath("slurm/files/task_prolog.sh").read_text()
    with subprocess.Popen(["sleep", "60"]) as task:
        known = f"SLURM_JOB_ID=7 SLURM_TASK_PID={task.pid} SLURM_JOB_NAME=x {variables}"
        done = machine.shell(f"export {known}\n{text}", program="sh")
        score = Path(f"/proc/{task.pid}/oom_score_adj").read_text()
        task.kill()

    call = f"python3 -I -S {machine.path('/etc/slurm/spr-cluster-limits')} hold 7 {task.pid}"
    # slurmstepd reads what it prints.
    assert (done.returncode, done.stdout, machine.calls) == (0, "", [call] if held else [])
    is_ours = "SLURM_JOB_NAME=mine" in variables
    assert score == (Path("/proc/self/oom_score_adj").read_text() if is_ours else "500\n")
