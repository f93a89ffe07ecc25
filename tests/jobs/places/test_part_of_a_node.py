"""A job with some cores of its nodes: planned by number, and pinned to those that the queue chose."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.slurm.configuration import order_cores, render_slurm_conf
from infra.errors import UsageError
from jobs.cli.run import run as run_program
from jobs.places.placement import Placement, check_part, plan_placement
from jobs.places.plan import JobPaths, JobPlan
from jobs.places.queue.slurm import build_launch, render_batch_script
from jobs.program.plan import read_variables
from jobs.worker.spec import JobSpec, PlacementOptions, Resources
from jobs.worker.supervisor import commands
from jobs.worker.supervisor.attempt import find_cause
from jobs.worker.supervisor.commands import SlurmJob
from jobs.worker.supervisor.launch import MASTER_PORT, Launch, build_argv
from jobs.worker.supervisor.nodes import take_part
from jobs.worker.supervisor.watch import LogWatch
from jobs.worker.supervisor.watcher import Watcher
from provision.facts import HostFacts
from provision.on_node.limits import PROGRAM, find_parts
from provision.on_node.limits import REPORT as GUARDS_REPORT
from provision.stacks.load import load_stack
from tests.jobs.context import parse_request, whole_cluster
from tests.jobs.places.topologies import interleaved, machine

PATHS = JobPaths("run-20261128-031814")
TWO_SOCKETS = machine(96, sockets=2, numa=2, smt=True)


def place(facts: HostFacts, cores: int, ppn: int | None = None, workers: int = 0) -> Placement:
    options = PlacementOptions("auto", ppn, workers or None)
    backend = "ccl" if workers else "gloo"
    return plan_placement({"node0": facts}, {"node0": "172.31.0.10"}, options, backend, cores)


def launch_on(
    facts: HostFacts, cores: int | None, memory: int | None = None, **more: Any
) -> Launch:
    placement = place(facts, cores or 0, **more)
    spec = JobSpec(resources=Resources(1, PlacementOptions(), cores, memory))
    plan = JobPlan("run", "worker.program", (), placement.backend, spec=spec)
    cluster = whole_cluster().first(1)
    return build_launch(plan, placement, PATHS, cluster, load_stack("upstream"))


def part_of(facts: HostFacts, numbers: list[int]) -> dict[str, Any]:
    """What Slurm's answer becomes on the node."""
    return {"numbers": numbers, "cores": [order_cores(facts)[number] for number in numbers]}


def pinned(launch: Launch, facts: HostFacts, numbers: list[int]) -> list[tuple[Any, ...]]:
    pinning, _ = take_part(launch, {"node0": part_of(facts, numbers)})
    return [(share.cpus, share.workers, share.numa) for share in pinning["node0"]]


@pytest.mark.parametrize(
    ("facts", "cores", "ppn", "expected"),
    [
        (TWO_SOCKETS, 4, None, (1, 4)),  # one rank, if they fit one NUMA node
        (TWO_SOCKETS, 48, None, (1, 48)),
        (TWO_SOCKETS, 4, 2, (2, 2)),
        (TWO_SOCKETS, 60, None, (2, 30)),  # one on each of the NUMA nodes that they need
        (TWO_SOCKETS, 61, None, (1, 61)),
        (machine(6, numa=2, allowed="0-4"), 4, None, (1, 4)),  # one socket for Slurm
        (machine(2), 1, None, (1, 1)),
        (machine(8, numa=4), 4, None, (2, 2)),
    ],
)
def test_ranks_of_a_part(
    facts: HostFacts, cores: int, ppn: int | None, expected: tuple[int, int]
) -> None:
    found = place(facts, cores, ppn)

    assert (found.nproc_per_node, found.omp_threads) == expected
    every = sorted(cpu for share in found.shares[0] for cpu in share.cpus)
    assert every == list(range(cores))


@pytest.mark.parametrize(
    ("resources", "message"),
    [
        (Resources(1, cores=9), "--cores 9: no node can hold that"),
        (Resources(2, cores=8), "--cores 8: only 1 of 2 nodes can hold that"),
        (Resources(1, cores=1, memory_gib=479), "--cores 1 --memory 479: no node can hold that"),
    ],
)
def test_a_part_that_no_node_ever_has_is_refused(resources: Resources, message: str) -> None:
    facts = {"node0": machine(2, smt=True), "node1": machine(8, smt=True)}
    with pytest.raises(UsageError) as error:
        check_part(resources, facts)
    assert error.value.message == message
    hint = "the largest, node1, has 8 physical cores, and 478 GiB for jobs"
    assert error.value.hint == hint
    for fitting in (Resources(1, cores=8, memory_gib=478), Resources(2, cores=2), Resources(9)):
        check_part(fitting, facts)
    with pytest.raises(UsageError, match="--cores: not with --placement reference"):
        check_part(Resources(1, PlacementOptions("reference"), cores=2), facts)


def ask(facts: HostFacts, cores: int | None, *memory: int, **more: Any) -> list[str]:
    """What the script asks the queue for."""
    script = render_batch_script(launch_on(facts, cores, *memory, **more), PATHS)
    lines = (line for line in script.splitlines() if line.startswith("#SBATCH"))
    own = {"job-name", "nodes", "output", "no-requeue"}
    assert f" SPR_CORES={cores or ''}\n" in script
    return [w for line in lines if (w := line[10:]).partition("=")[0] not in own]


def test_the_queue_is_asked_for_cores_of_one_numa_node_and_memory() -> None:
    each = ["ntasks-per-node=1", "cpus-per-task=4"]
    assert ask(TWO_SOCKETS, None) == ["exclusive", "mem=0"]
    assert ask(TWO_SOCKETS, 4) == [*each, "cores-per-socket=4"]
    assert ask(TWO_SOCKETS, 4, 16, ppn=2) == [*each, "cores-per-socket=4", "mem=16G"]
    # They need both sockets, and each rank its own.
    both = ["ntasks-per-node=2", "cpus-per-task=30", "ntasks-per-socket=1"]
    assert ask(TWO_SOCKETS, 60) == ask(TWO_SOCKETS, 60, workers=1) == both
    assert ask(TWO_SOCKETS, 60, ppn=6) == both
    assert ask(TWO_SOCKETS, 60, ppn=1) == ["ntasks-per-node=1", "cpus-per-task=60"]
    assert ask(TWO_SOCKETS, 61) == ["ntasks-per-node=1", "cpus-per-task=61"]
    assert ask(TWO_SOCKETS, 62) == ["ntasks-per-node=2", "cpus-per-task=31", "ntasks-per-socket=1"]
    assert ask(TWO_SOCKETS, 63, ppn=21) == ["ntasks-per-node=1", "cpus-per-task=63"]


@pytest.mark.parametrize(
    "facts",
    [
        TWO_SOCKETS,
        interleaved(4),
        machine(7),
        machine(8, numa=4),
        machine(6, numa=2, allowed="0-4"),
    ],
)
def test_no_job_asks_for_sockets_that_the_nodes_do_not_have(facts: HostFacts) -> None:
    node = whole_cluster().head
    conf = render_slurm_conf("bert", [node], {node.name: facts})
    sockets, each = map(int, re.findall(r" (?:Sockets|CoresPerSocket)=(\d+)", conf))
    for cores in range(1, len(facts.physical_cores) + 1):
        asked = dict.fromkeys(("cores-per-socket", "ntasks-per-socket"), "0")
        asked |= dict(word.split("=") for word in ask(facts, cores))
        tasks, width = int(asked["ntasks-per-node"]), int(asked["cpus-per-task"])
        assert tasks * width == cores
        assert int(asked["cores-per-socket"]) <= each
        if int(asked["ntasks-per-socket"]):
            assert tasks <= sockets
            assert width <= each


def test_of_unlike_nodes_each_can_take_the_job() -> None:
    options, facts = PlacementOptions("auto"), {"node0": TWO_SOCKETS, "node1": machine(64)}
    addresses = dict.fromkeys(facts, "172.31.0.10")
    found = plan_placement(facts, addresses, options, "gloo", 60)
    assert {share.numa for shares in found.shares for share in shares} == {None}


@pytest.mark.parametrize(
    ("facts", "cores", "more", "numbers", "expected"),
    [
        (machine(2), 1, {}, [1], [((1,), (), 0)]),
        (TWO_SOCKETS, 2, {}, [50, 51], [((50, 51), (), 1)]),
        # Of a rank's cores, some may be on another NUMA node: its memory is then where its threads are.
        (TWO_SOCKETS, 2, {}, [47, 48], [((47, 48), (), None)]),
        (TWO_SOCKETS, 4, {"ppn": 2}, [5, 6, 48, 49], [((5, 6), (), 0), ((48, 49), (), 1)]),
        (
            TWO_SOCKETS,
            60,
            {},
            [*range(18, 78)],
            [((*range(18, 48),), (), 0), ((*range(48, 78),), (), 1)],
        ),
        (machine(8), 4, {"workers": 1}, [3, 4, 6, 7], [((4, 6, 7), (3,), 0)]),
        # Slurm's second core is the third of this machine.
        (interleaved(4), 2, {}, [1, 2], [((2, 1), (), None)]),
        (machine(4, allowed="1-3"), 2, {}, [0, 2], [((1, 3), (), 0)]),
        (machine(8, numa=4), 2, {}, [6, 7], [((6, 7), (), 3)]),
    ],
)
def test_ranks_are_pinned_to_the_cores_that_the_queue_chose(
    facts: HostFacts, cores: int, more: dict[str, int], numbers: list[int], expected: list[Any]
) -> None:
    assert pinned(launch_on(facts, cores, **more), facts, numbers) == expected


def test_neighbors_meet_at_different_ports_and_the_heartbeat_is_below_them() -> None:
    launch = launch_on(TWO_SOCKETS, 1)
    ports = []
    for first in (0, 1, 95):
        pinning, port = take_part(launch, {"node0": part_of(TWO_SOCKETS, [first])})
        prepared = launch.prepared(again=False, pinning=pinning, port=port)
        argv = build_argv(prepared, ["node0"], "192.0.2.7")
        assert argv[argv.index("MASTER_PORT") + 1] == str(port)
        ports.append(port)
    assert ports[0] == MASTER_PORT
    taken = {each for port in ports for each in (port - 1, port, port + 1)}
    assert len(taken) == 9
    # Linux gives ports above this to any connection.
    assert max(taken) < 32768
    argv = build_argv(launch_on(TWO_SOCKETS, None), ["node0"], "192.0.2.7")
    assert argv[argv.index("MASTER_PORT") + 1] == "29500"


_SHOWN = (
    "JobId=7 JobName=x NodeList=node[0-2] BatchHost=node0 NumNodes=3 JOB_GRES=(null)"
    "   Nodes=node0 CPU_IDs=5-7,13 Mem=3000 GRES=   Nodes=node[1-2] CPU_IDs=0 Mem=700 GRES= MinCPUs=1"
)


def test_slurms_answer_becomes_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"job": _SHOWN, "node0": "node0\n", "node[1-2]": "node1\nnode2\n"}
    found = lambda *argv: answers[argv[-1] if argv[-2] == "hostnames" else "job"]  # noqa: E731
    monkeypatch.setattr("provision.on_node.limits._ask", found)
    known = {f"node{n}": [[0, core, 16 + core] for core in range(16)] for n in range(2)}
    parts = find_parts("7", {**known, "node2": [[0, 0]]})

    assert parts["node0"] == ([5, 6, 7, 13], [[0, n, 16 + n] for n in (5, 6, 7, 13)], 3000, False)
    assert parts["node1"] == ([0], [[0, 0, 16]], 700, False)
    assert parts["node2"].is_whole


def test_the_supervisor_asks_the_node_s_own_program(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (commands.PART[3:], commands.REPORT) == ((PROGRAM, "cores"), GUARDS_REPORT)
    asked: list[list[str]] = []
    answers = iter(["", '{"node1": {"cores": [1]}}', '{"node1": 1, "node0": 2, "node2": 3}'])

    def answer(argv: list[str]) -> str:
        asked.append(argv)
        return next(answers)

    monkeypatch.setattr(commands, "_ask", answer)
    monkeypatch.setattr("time.sleep", lambda _: None)
    job = SlurmJob("7", ("node1", "node0"), 1)

    # By node in rank order, once Slurm says it of all nodes.
    assert [*job.ask_part().items()] == [("node1", 1), ("node0", 2)]
    assert asked == [[*commands.PART, "7"]] * 3


def test_a_job_that_took_more_than_its_part_does_not_try_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(commands, "_ask", lambda argv: "it used more" if "node1" in argv else "")
    job = SlurmJob("7", ("node0", "node1"), 1)
    (tmp_path / "log").touch()
    launch = replace(launch_on(TWO_SOCKETS, 2), nproc_per_node=2)
    watcher = Watcher(launch, job, LogWatch(tmp_path / "log", 0))
    watcher.log.lost = ("node1",)  # mpirun only notices that
    watcher.limited = job.ask_limited("/job")

    assert watcher.limited == {"node1": "it used more"}
    assert find_cause(watcher) == {"rank": 2, "host": "node1", "message": "it used more"}


def test_a_command_line_asks_for_a_part_of_one_node(tmp_path: Path) -> None:
    def read(*words: str) -> Resources:
        found: Resources = parse_request("run", *words, "--", "true").resources
        return found

    whole = PlacementOptions()
    assert read() == Resources(None, whole)
    assert read("--cores", "4") == Resources(1, whole, 4)
    asked = read("--cores", "4", "--memory", "16", "--nodes", "2", "--ppn", "2")
    assert asked == Resources(2, PlacementOptions("auto", 2), 4, 16)
    with pytest.raises(UsageError, match=r"--memory.* --cores"):
        read("--memory", "16")


def test_a_dry_run_shows_the_part_and_its_price(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("run", "--dry-run", "--instance-type", "r7iz.metal-16xl", "--cores", "8", "--", "true")
    run_program(parse_request(*words))
    shown = capsys.readouterr().out

    assert "1 node (r7iz.metal-16xl), each with 8 of 32 cores: 1 rank of 8 threads" in shown
    assert "The job costs 25.0% of its nodes' price.\n" in shown
    two_sockets = ("--instance-type", "c7i.metal-48xl", "--cores", "60")
    run_program(parse_request("run", "--dry-run", *two_sockets, "--", "true"))
    assert "each with 60 of 96 cores: 2 ranks of 30 threads" in capsys.readouterr().out
    with pytest.raises(UsageError, match="--cores 33: no node can hold that"):
        run_program(parse_request(*("33" if word == "8" else word for word in words)))


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("D=pa#ss", "pa#ss"),
        ("D=pa # word", "pa"),
        ("D='a #b' # word", "a #b"),
        ("export D=#", "#"),
        ("D= # none", ""),
    ],
)
def test_a_file_of_variables_comes_before_the_command_line_and_may_have_comments(
    tmp_path: Path, line: str, value: str
) -> None:
    file = tmp_path / "some.env"
    file.write_text(f"A=1\n{line}")
    assert read_variables(file) == ("A=1", f"D={value}")
    words = ("run", "--env", "A=2", "--env", f"@{file}", "--", "true")
    assert parse_request(*words).read_variables() == ("A=1", f"D={value}", "A=2")
