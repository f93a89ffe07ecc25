"""The mpirun command, and the batch script that runs it, as golden files."""

from __future__ import annotations

import io
import shlex
import subprocess
import tarfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.nodes import Cluster
from infra.errors import UsageError
from jobs.places.environment import warn_ignored
from jobs.places.placement import Placement, plan_placement
from jobs.places.plan import JobPaths, JobPlan
from jobs.places.queue.slurm import build_launch, render_batch_script, render_command
from jobs.train.request import require_able_stack
from jobs.worker.runtime.pinning import RankPlacement, read_plan
from jobs.worker.runtime.process import NODES
from jobs.worker.spec import PlacementOptions
from jobs.worker.supervisor.launch import Launch, build_argv, parse_launch
from jobs.worker.supervisor.nodes import PACK
from provision.facts import HostFacts
from provision.stacks.load import load_stack
from provision.stacks.stack import Stack
from tests.golden import check_golden, compare
from tests.jobs.context import whole_cluster
from tests.jobs.places.topologies import machine

GOLDEN = Path(__file__).with_name("golden")
PATHS = JobPaths("squad-20260731-142501")
UPSTREAM = load_stack("upstream")
ARGV = ("squad", "--model=distilbert-base-uncased", "--output=/home/ubuntu/spr-jobs/it's here")


def make_plan(backend: str) -> JobPlan:
    return JobPlan("squad", "worker.tasks", ARGV, backend)


def with_environment(stack: str, **environment: str) -> Stack:
    return load_stack(stack).model_copy(update={"environment": environment})


def place(*facts: HostFacts, backend: str, **options: Any) -> Placement:
    by_name = {f"node{rank}": fact for rank, fact in enumerate(facts)}
    addresses = dict.fromkeys(by_name, "172.31.0.10")
    return plan_placement(by_name, addresses, PlacementOptions(**options), backend)


def command_for(
    *facts: HostFacts, backend: str = "gloo", stack: Stack = UPSTREAM, **options: Any
) -> Launch:
    placement = place(*facts, backend=backend, **options)
    cluster = whole_cluster().first(len(facts))
    return build_launch(make_plan(backend), placement, PATHS, cluster, stack)


def launch_of(plan: JobPlan, cluster: Cluster | None = None) -> Launch:
    """The launch of a plan on one node with two cores."""
    placement = place(machine(2), backend=plan.backend)
    return build_launch(plan, placement, PATHS, cluster or whole_cluster().first(1), UPSTREAM)


def words(launch: Launch) -> list[str]:
    """The mpirun command on the first of the job's nodes."""
    return shlex.split(render_command(launch, "192.0.2.1"))


def environment(words: Sequence[str], flag: str = "-genv") -> dict[str, str]:
    """The variables that a part of an mpirun line sets."""
    found = [at for at, word in enumerate(words) if word == flag]
    return {words[at + 1]: words[at + 2] for at in found}


def test_a_replacement_node_gets_console_scripts_and_shared_folders_but_no_output(
    tmp_path: Path,
) -> None:
    (tmp_path / "site/bin").mkdir(parents=True)
    (tmp_path / "site/bin/go").touch()
    (tmp_path / "work").mkdir()
    home = Path("/home/nobody")  # which does not exist, so tar names what it would pack
    (tmp_path / "packages").symlink_to(home / "spr-packages/k")
    (tmp_path / "work/data").symlink_to(home / "spr-data/d")
    (tmp_path / "work/runs").symlink_to(home / "spr-jobs/run-1/output")

    packed = subprocess.run(["bash", "-c", PACK], cwd=tmp_path, capture_output=True, check=False)

    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        assert {"site/bin/go", "packages", "work/data", "work/runs"} <= {*archive.getnames()}
    missing = packed.stderr.decode()
    assert "spr-packages/k" in missing
    assert "spr-data/d" in missing
    assert "spr-jobs" not in missing


def test_launch_and_batch_script() -> None:
    gloo, ccl = (
        command_for(*[machine(4, smt=True)] * 2, backend=backend) for backend in ("gloo", "ccl")
    )
    text = gloo.render().decode()
    check_golden(GOLDEN / "launch.json", text)
    check_golden(GOLDEN / "launch_ccl.diff", compare(text, ccl.render().decode()))

    script = render_batch_script(gloo, PATHS)
    check_golden(GOLDEN / "run.sh", script)
    subprocess.run(["bash", "-n"], input=script.encode(), check=True)


def test_a_launch_is_read_as_it_was_written() -> None:
    launch = replace(
        command_for(machine(2)), program=("it's", 'a "b"', "$HOME `id`\n\\n", "é\udcff")
    )

    assert parse_launch(launch.render().decode()) == launch


def test_a_job_runs_on_the_nodes_that_it_gets() -> None:
    """Each has its own cores, whatever its place among them."""
    facts = [machine(2, allowed="0"), machine(2, allowed="0"), machine(2, allowed="1")]
    launch = command_for(*facts)

    same = build_argv(launch, ("node1", "node0"), "192.0.2.7")
    other = build_argv(launch, ("node2", "node1"), "192.0.2.9")
    sets = " ".join(other).split(" : ")

    assert environment(same)["MASTER_ADDR"] == "192.0.2.7"
    assert environment(same)[NODES] == "node1,node0"
    assert " ".join(same).count(" -n 2 ") == 1
    shared = environment(other)
    assert "I_MPI_PIN_DOMAIN" not in shared
    assert shared["OMP_NUM_THREADS"] == "1"
    for part, mask, cpu in zip(sets, ("[0x2]", "[0x1]"), ("1", "0"), strict=True):
        own = environment(part.split(), "-env")
        assert own["I_MPI_PIN_DOMAIN"] == mask
        assert read_plan({**own, "MPI_LOCALRANKID": "0"}) == RankPlacement(cpu, 1, "prefer:0")
        assert "-n 1" in part
        assert "-m worker.tasks squad" in part
    with pytest.raises(KeyError):
        build_argv(launch, ("node9",), "192.0.2.1")


def test_masks_and_worker_cores_of_two_ranks() -> None:
    command = command_for(machine(8, smt=True), backend="ccl", nproc_per_node=2, ccl_workers=2)
    found = environment(words(command))

    assert found["I_MPI_PIN_DOMAIN"] == "[0xc,0xc0]"
    assert found["CCL_WORKER_AFFINITY"] == "0,1,4,5"
    assert (found["CCL_WORKER_COUNT"], found["OMP_NUM_THREADS"]) == ("2", "2")
    assert found["CCL_ALLREDUCE"] == "recursive_doubling:0-8192;ring:8193-max"
    plans = [read_plan({**found, "MPI_LOCALRANKID": rank}) for rank in "01"]
    assert plans == [
        RankPlacement("2-3", 2, "prefer:0", "0-1"),
        RankPlacement("6-7", 2, "prefer:0", "4-5"),
    ]


def test_intels_openmp_is_preloaded_and_alone_configured() -> None:
    iomp5 = "/opt/spr-cluster/venv/lib/libiomp5.so"
    found = environment(words(command_for(machine(4, iomp5=iomp5))))

    assert found["LD_PRELOAD"] == f"{iomp5}:/usr/lib/x86_64-linux-gnu/libtcmalloc.so.4"
    assert found["KMP_AFFINITY"] == "granularity=fine,compact,1,0"
    assert "OMP_PROC_BIND" not in found
    without = environment(words(command_for(machine(4))))
    assert not [name for name in without if name.startswith("KMP_")]


def test_a_stacks_environment_reaches_the_ranks_and_can_not_oversubscribe_them() -> None:
    own = {"OMP_NUM_THREADS": "24", "CCL_WORKER_COUNT": "2", "CCL_WORKER_AFFINITY": "auto"}
    stack = with_environment("intel", **own, KMP_HW_SUBSET="1T", CCL_LOG_LEVEL="info")

    found = environment(
        words(command_for(machine(8), backend="ccl", stack=stack, nproc_per_node=2))
    )

    assert (found["OMP_NUM_THREADS"], found["CCL_WORKER_COUNT"]) == ("3", "1")
    assert found["CCL_WORKER_AFFINITY"] == "0,4"
    assert "KMP_HW_SUBSET" not in found
    assert found["CCL_LOG_LEVEL"] == "info"
    assert warn_ignored(stack, place(machine(8), backend="ccl")) == (
        "ignoring CCL_WORKER_AFFINITY, CCL_WORKER_COUNT, KMP_HW_SUBSET, OMP_NUM_THREADS from the "
        "stack: the placement sets them",
    )


def test_the_published_recipe_is_not_pinned_and_keeps_its_own_variables() -> None:
    stack = with_environment("intel", KMP_HW_SUBSET="2T")
    published: dict[str, Any] = {"backend": "ccl", "mode": "reference"}
    own = environment(words(command_for(machine(32), stack=stack, **published)))
    assert own["KMP_HW_SUBSET"] == "2T"
    assert warn_ignored(stack, place(machine(32), **published)) == ()

    found = environment(words(command_for(machine(32), **published)))
    assert "I_MPI_PIN_DOMAIN" not in found
    assert (found["OMP_NUM_THREADS"], found["KMP_HW_SUBSET"]) == ("24", "1T")
    assert (found["CCL_WORKER_COUNT"], found["CCL_WORKER_AFFINITY"]) == ("2", "auto")
    assert read_plan({**found, "MPI_LOCALRANKID": "1"}) == RankPlacement(None, 24, None)


@pytest.mark.parametrize(
    ("given", "left"),
    [((), {"HTTP_PROXY", "http_proxy"}), (("HTTP_PROXY=http://mine:1",), set())],
)
def test_ranks_have_the_clusters_variables_unless_the_user_sets_them(
    given: tuple[str, ...], left: set[str]
) -> None:
    variables = dict.fromkeys(("HTTP_PROXY", "http_proxy"), "http://10.0.0.9:3128")
    cluster = replace(whole_cluster().first(1), environment=variables)
    plan = replace(make_plan("gloo"), variables=given)

    found = environment(words(launch_of(plan, cluster)))

    assert {name for name in found if "proxy" in name.lower()} == left


def test_an_old_torch_is_refused_on_a_new_python() -> None:
    packages = ["torch==2.3.0", "transformers==4.40.0", "impi-rt==2021.18.1"]
    stack = {**UPSTREAM.model_dump(), "python_packages": packages}
    with pytest.raises(UsageError, match=r"Python 3\.12 and torch 2\.3\.0"):
        require_able_stack(Stack.model_validate(stack), "train squad")
