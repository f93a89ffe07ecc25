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
from jobs.launchers.kubernetes.resources import core_path

from jobs.__main__ import main
from jobs.worker.runtime.output import state_folder
from jobs.worker.tasks.squad.task import DEMO
from tests.e2e.kubernetes.conftest import MARKS, Space
from tests.e2e.kubernetes.control_plane import NODE, ControlPlane, wait_for
from tests.e2e.kubernetes.images import JOB, save_images
from tests.e2e.kubernetes.node import running_node
from tests.e2e.kubernetes.operator import operating
from tests.jobs.cli.test_main import run
from tests.jobs.worker.training.test_run import run_ranks

EPOCHS, LONG_EPOCHS = 6, 60
TRAINED_S = 120.0
# Pods that fit on the smallest machine: a node keeps one of its cores, a pod has the other.
SHAPE = ("--cores", "2", "--threads-per-core", "1", "--memory", "4")
TWO_PODS = ("squad", "--nodes", "2", "--demo", "--any-cpu", "--kind", "PyTorchJob", *SHAPE)
BERT = (*TWO_PODS, "--name", "bert", "--image", JOB, "--epochs", str(EPOCHS))
LONG = (*BERT, "--epochs", str(LONG_EPOCHS), "--checkpoint-every", "40")
RESTARTED = "pod bert-master-0 has restarted 1 time: the log of its run before, then of this one\n"

Train = Callable[[int], dict[str, Any]]
"""Trains for a number of epochs, and returns the results."""

pytestmark = [*MARKS, pytest.mark.skipif(os.geteuid() != 0, reason="a node needs root")]


@pytest.fixture(scope="module")
def node(plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A node with the image of a rendered folder; and that folder."""
    folder = tmp_path_factory.mktemp("images")
    build = folder / "build"
    assert main(("render", "k8s", *BERT, "--output", str(build))) == 0
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
    with operating(space.api, space.jobs):
        yield folder


def test_from_a_cluster_to_a_trained_model(
    space: Space, volume: Path, tmp_path: Path, bare_metal: Train
) -> None:
    ended = space.run("submit", *BERT)

    assert ended.code == 0, ended.err
    assert "2 ranks on bert-master-0, bert-worker-0; backend gloo" in ended.err
    assert "to fetch them: spr-cluster fetch bert --namespace" in ended.out
    shown = space.wait_for_status("succeeded")
    for name in ("bert-master-0", "bert-worker-0"):
        assert f"pod {name}: Succeeded on {NODE}, 0 restarts" in shown
    log = space.run("logs", "bert")
    assert (log.code, log.err) == (0, "")
    assert "2 ranks on bert-master-0, bert-worker-0" in log.out
    folder = tmp_path / "fetched"
    fetched = space.run("fetch", "bert", "--results", str(folder))
    assert fetched.code == 0, fetched.err
    assert fetched.out.startswith(f"bert (succeeded): {folder}/\n")
    assert len(space.find("pods")) == 2
    trained = json.loads((folder / "results.json").read_text())
    assert [each["hostname"] for each in trained["ranks"]] == ["bert-master-0", "bert-worker-0"]
    expected = bare_metal(EPOCHS)
    for name in ("loss_curve", "f1", "em"):
        assert trained[name] == expected[name], name
    assert run(space.capsys, "report", str(folder)).code == 0

    gone = space.run("cancel", "bert")
    assert (gone.code, gone.out) == (0, "Job bert is gone.\n"), gone.err
    assert space.find("pods") == []
    assert (volume / "jobs/bert/output/model").is_dir()


def test_killed_and_deleted_jobs_resume(space: Space, volume: Path, bare_metal: Train) -> None:
    output = volume / "jobs/bert/output"
    assert space.run("submit", *LONG, "--detach").code == 0
    wait_for("a checkpoint", lambda: bool(list(output.glob("checkpoints/*"))), TRAINED_S)
    pod = core_path(space.name, "pods", "bert-worker-0")
    rank = "pgrep --newest --full '^/opt/.*-m worker.tasks squad '"
    list(space.api.run(pod, "pytorch", ["sh", "-c", f"kill -KILL $({rank})"]))

    wait_for("its restart", lambda: '"resumed"' in read_log(output), TRAINED_S)
    shown = space.wait_for_status("running")
    # The rank that waited for the dead one ended, too, and so did its pod.
    for name in ("bert-master-0", "bert-worker-0"):
        assert f"pod {name}: Running on {NODE}, 1 restart" in shown
    log = space.run("logs", "bert")
    assert log.err == RESTARTED
    # That of the killed run, then that of the next.
    assert log.out.count("2 ranks on bert-master-0, bert-worker-0") == 2
    assert "ChildFailedError" in log.out
    gone = space.run("cancel", "bert")
    assert (gone.code, gone.out) == (0, "Job bert is gone.\n"), gone.err
    assert '"stopped"' in read_log(output)

    ended = space.run("submit", *LONG)
    assert ended.code == 0, ended.err
    trained = json.loads((output / "results.json").read_text())
    assert len(trained["resumed_after"]) == 2
    assert trained["loss_curve"] == bare_metal(LONG_EPOCHS)["loss_curve"]


@pytest.mark.usefixtures("volume")
def test_an_image_that_can_not_be_pulled(space: Space) -> None:
    # No registry listens there.
    words = (*TWO_PODS, "--name", "bert", "--image", "127.0.0.1:9/spr:1")
    assert space.run("submit", *words, "--detach").code == 0

    shown = space.wait_for_status("image 127.0.0.1:9/spr:1 can't be pulled")
    assert "connection refused" in "".join(shown)


def read_log(output: Path) -> str:
    return (state_folder(output) / "logs" / "rank-0.log").read_text()
