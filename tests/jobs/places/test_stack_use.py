"""What a job uses of its cluster's stack."""

from __future__ import annotations

import pytest

from infra.errors import UsageError
from jobs.places.placement import plan_placement
from jobs.places.plan import JobPaths, JobPlan
from jobs.places.queue.slurm import build_launch
from jobs.train.request import require_able_stack
from jobs.worker.spec import PlacementOptions
from provision.stacks.load import load_stack
from provision.stacks.stack import Stack, environment_lookup
from tests.jobs.context import whole_cluster
from tests.jobs.places.topologies import machine


@pytest.mark.parametrize("name", ["intel", "upstream"])
def test_worker_code_runs_on_other_stacks(name: str) -> None:
    require_able_stack(load_stack(name), "train squad")


def test_an_old_torch_is_refused_on_a_new_python() -> None:
    packages = ["torch==2.3.0", "transformers==4.40.0", "impi-rt==2021.18.1"]
    stack = {**load_stack("upstream").model_dump(), "python_packages": packages}
    with pytest.raises(UsageError, match=r"Python 3\.12 and torch 2\.3\.0"):
        require_able_stack(Stack.model_validate(stack), "train squad")


@pytest.mark.parametrize(("version", "module"), [("1.11.0", "torch_ccl"), ("1.12.0", "oneccl_")])
def test_oneccl_environment_is_sourced_from_its_versions_path(version: str, module: str) -> None:
    paths = JobPaths("squad-20260731-142501")
    packages = [f"oneccl-bind-pt=={version}"]
    stack = load_stack("reference").model_copy(update={"python_packages": packages})
    plan = JobPlan("squad", "worker.tasks", (), "ccl")
    placement = plan_placement(
        {"node0": machine(32)}, {"node0": "172.31.0.10"}, PlacementOptions(), "ccl"
    )
    launch = build_launch(plan, placement, paths, whole_cluster().first(1), stack)

    ask, source = launch.setup

    assert f"/venv/bin/python -c '{environment_lookup(version)}'" in ask
    assert module in ask
    assert source == '. "$ccl/env/setvars.sh" || exit 1'
