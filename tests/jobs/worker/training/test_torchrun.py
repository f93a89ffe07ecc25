"""The job under the real torchrun, as Kubeflow's operators start it: the same training as under mpirun."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

from jobs.worker.tasks.squad.task import SquadOptions
from jobs.worker.training.checkpoints import list_checkpoints
from tests.harness.forked import Forked
from tests.jobs.worker.training.test_run import (
    LOOPBACK,
    finish,
    free_port,
    run_ranks,
    small,
    squad_argv,
)


def start_torchrun(folder: Path, options: SquadOptions, ranks: int = 2) -> Forked:
    """Start the ranks with the variables of a pod."""
    pod = {"PET_NNODES": "1", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": str(ranks)}
    pod |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(free_port())}
    # What the operator of PyTorchJob also sets, about pods instead of ranks.
    pod |= {**LOOPBACK, "RANK": "0", "WORLD_SIZE": str(ranks), "OMP_PROC_BIND": "false"}
    argv = ["-m", "torch.distributed.run", *squad_argv(options)]
    return Forked(argv, folder, {**os.environ, **pod})


def test_torchrun_trains_as_mpirun_does(nodes_folder: Path) -> None:
    by_mpirun = small(nodes_folder, "mpirun", batch_size=4)
    by_torchrun = replace(by_mpirun, output=str(nodes_folder / "torchrun"))

    ended = run_ranks(nodes_folder, [by_mpirun] * 2)
    pod = finish(start_torchrun(nodes_folder, by_torchrun))

    assert [each.code for each in (*ended, pod)] == [0, 0, 0], pod.output
    ours, theirs = (
        json.loads((nodes_folder / name / "results.json").read_text())
        for name in ("torchrun", "mpirun")
    )
    for same in ("loss_curve", "f1", "em", "world_size", "train_samples"):
        assert ours[same] == theirs[same], same
    assert [each["rank"] for each in ours["ranks"]] == [0, 1]
    assert all(each["threads"] == 1 for each in ours["ranks"])
    assert all((nodes_folder / f"torchrun.state/logs/rank-{rank}.log").is_file() for rank in (0, 1))


def test_a_stopped_pod_leaves_a_checkpoint(nodes_folder: Path) -> None:
    # The arguments of a restarted pod, from the first time on: it has no others.
    pod = replace(small(nodes_folder, "pod", batch_size=4), epochs=40, resume=True)

    process = start_torchrun(nodes_folder, pod, ranks=1)
    printed = iter(process.stdout)
    assert any('"event": "step"' in line for line in printed)
    process.send_signal(signal.SIGTERM)  # as kubelet does

    (stopped,) = finish(process).of("stopped")
    (kept,) = list_checkpoints(nodes_folder / "pod")
    assert kept.name == stopped["checkpoint"] == f"step-{stopped['step']:06d}"
