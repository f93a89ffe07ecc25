"""Jobs that train on a real node: kubelet 1.20.2, containerd, and the image of the rendered Dockerfile.

Kubeflow's operator is a stand-in. Two pods share the node, and exchange gradients over its bridge.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs.__main__ import main
from jobs.worker.runtime.output import state_folder
from jobs.worker.tasks.squad.task import DEMO
from tests.e2e.kubernetes.conftest import MARKS, Space
from tests.e2e.kubernetes.control_plane import ControlPlane, wait_for
from tests.e2e.kubernetes.images import JOB, save_images
from tests.e2e.kubernetes.node import running_node
from tests.e2e.kubernetes.operator import operating
from tests.jobs.cli.test_main import run
from tests.jobs.worker.training.test_run import run_ranks

EPOCHS, LONG_EPOCHS = 6, 60
TRAINED_S = 120.0
# Pods that fit on the smallest machine: a node keeps one of its cores, a pod has the other.
SHAPE = ("--shape", "cores=2,threads=1,memory=8")
TWO_PODS = ("--nodes", "2", "--node-selector", "any", "--kind", "PyTorchJob", *SHAPE)
BERT = ("squad", "--demo", "--job-name", "bert", "--image", JOB, "--epochs", str(EPOCHS), *TWO_PODS)
LONG = (*BERT, "--epochs", str(LONG_EPOCHS), "--checkpoint-every", "40")

Train = Callable[[int], dict[str, Any]]
"""Trains for a number of epochs, and returns the results."""

pytestmark = [*MARKS, pytest.mark.skipif(os.geteuid() != 0, reason="a node needs root")]


@pytest.fixture(scope="module")
def node(plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A node with the image of a rendered folder; and that folder."""
    folder = tmp_path_factory.mktemp("images")
    build = folder / "build"
    assert main(("train", *BERT, "--to", "kubernetes-yaml", "--output", str(build))) == 0
    with running_node(plane, save_images(build, folder)):
        yield build


@pytest.fixture
def bare_metal(node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Trains in two processes on this machine, with the code of the image."""

    def train(epochs: int) -> dict[str, Any]:
        monkeypatch.setenv("PYTHONPATH", str(node / "code"))
        options = replace(DEMO, epochs=epochs, backend="gloo", output=str(tmp_path / "bare-metal"))
        ranks = [replace(options, token_cache=str(tmp_path / "cache"))] * 2
        ended = run_ranks(tmp_path, ranks)
        assert [each.code for each in ended] == [0, 0], ended
        found: dict[str, Any] = json.loads((tmp_path / "bare-metal/results.json").read_text())
        return found

    return train


@pytest.fixture
def volume(space: Space, node: Path, tmp_path: Path) -> Iterator[Path]:
    """The folder that the claim gets; and an operator."""
    folder = tmp_path / "volume"
    folder.mkdir()
    folder.chmod(0o777)
    space.give_volume({"hostPath": {"path": str(folder)}})
    with operating(space.plane, space.name):
        yield folder


def test_from_yaml_to_a_trained_model(
    space: Space, node: Path, volume: Path, tmp_path: Path, bare_metal: Train
) -> None:
    created = space.apply(*BERT)

    assert created.code == 0, created.err
    wait_for("the end of both pods", lambda: phases(space) == ["Succeeded"] * 2, TRAINED_S)
    assert '"hosts": ["bert-master-0", "bert-worker-0"]' in space.kubectl("logs", "bert-master-0")
    space.kubectl("create", "-f", str(node / "copy.yaml"))
    space.kubectl("wait", "--for=condition=Ready", "--timeout=60s", "pod/copy")
    folder = tmp_path / "fetched"
    space.kubectl("cp", "copy:/workspace/jobs/bert/output", str(folder))
    trained = json.loads((folder / "results.json").read_text())
    assert [each["hostname"] for each in trained["ranks"]] == ["bert-master-0", "bert-worker-0"]
    expected = bare_metal(EPOCHS)
    for name in ("loss_curve", "f1", "em"):
        assert trained[name] == expected[name], name
    assert run(space.capsys, "report", str(folder)).code == 0

    space.kubectl("delete", "-f", str(node / "copy.yaml"))
    delete(space)
    assert (volume / "jobs/bert/output/model").is_dir()


def test_killed_and_deleted_jobs_resume(space: Space, volume: Path, bare_metal: Train) -> None:
    output = volume / "jobs/bert/output"
    assert space.apply(*LONG).code == 0
    checkpoints = state_folder(output) / "checkpoints"
    wait_for("a checkpoint", lambda: bool(list(checkpoints.glob("*"))), TRAINED_S)
    rank = "pgrep --newest --full '^/opt/.*-m worker.tasks squad '"
    space.kubectl("exec", "bert-worker-0", "--", "sh", "-c", f"kill -KILL $({rank})")

    wait_for("its restart", lambda: '"resumed"' in read_log(output), TRAINED_S)
    # The rank that waited for the dead one ended as well, and so did its pod.
    restarts = [
        each["status"]["containerStatuses"][0]["restartCount"] for each in space.find("pods")
    ]
    assert restarts == [1, 1]
    assert "ChildFailedError" in space.kubectl("logs", "--previous", "bert-master-0")
    delete(space)
    assert '"stopped"' in read_log(output)

    assert space.apply(*LONG).code == 0
    wait_for("the end of both pods", lambda: phases(space) == ["Succeeded"] * 2, TRAINED_S)
    trained = json.loads((output / "results.json").read_text())
    assert len(trained["resumed_after"]) == 2
    assert trained["loss_curve"] == bare_metal(LONG_EPOCHS)["loss_curve"]


def phases(space: Space) -> list[str]:
    """Return the phases of the job's pods."""
    return [pod["status"]["phase"] for pod in space.find("pods")]


def delete(space: Space) -> None:
    """Delete the job, and wait until its pods have saved a checkpoint and ended."""
    space.kubectl("delete", "pytorchjob", "bert")
    wait_for("the end of the pods", lambda: space.find("pods") == [], TRAINED_S)


def read_log(output: Path) -> str:
    return (state_folder(output) / "logs" / "rank-0.log").read_text()
