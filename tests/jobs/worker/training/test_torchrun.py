"""The job under the real torchrun, as Kubeflow's operators start it: the same training as under mpirun."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

from jobs.worker.runtime.events import parse_event
from jobs.worker.tasks.squad.task import SquadOptions
from tests.harness.forked import Forked
from tests.jobs.worker.training.test_run import (
    LOOPBACK,
    Ended,
    finish,
    free_port,
    run_ranks,
    small,
    squad_argv,
)


def start_torchrun(folder: Path, options: SquadOptions) -> Forked:
    """Start two ranks with the variables of a pod."""
    pod = {"PET_NNODES": "1", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "2"}
    pod |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(free_port())}
    # What the operator of PyTorchJob also sets, about pods instead of ranks.
    pod |= {**LOOPBACK, "RANK": "0", "WORLD_SIZE": "2", "OMP_PROC_BIND": "false"}
    argv = ["-m", "torch.distributed.run", *squad_argv(options)]
    return Forked(argv, folder, {**os.environ, **pod})


def stop_after(process: Forked, event: str) -> Ended:
    """Send SIGTERM, as kubelet does, at an event."""
    seen = []
    for line in process.stdout:
        seen.append(line)
        found = parse_event(line)
        if found and found["event"] == event:
            break
    process.send_signal(signal.SIGTERM)
    rest = finish(process)
    return rest._replace(output="".join(seen) + rest.output)


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


def test_a_stopped_pod_leaves_a_checkpoint_that_the_next_one_resumes(nodes_folder: Path) -> None:
    # The same arguments from the first time on: a restarted pod has no others.
    pod = replace(small(nodes_folder, "pod", batch_size=4), epochs=4, resume=True)

    stopped = stop_after(start_torchrun(nodes_folder, pod), "step")
    assert stopped.of("stopped"), stopped.output
    again = finish(start_torchrun(nodes_folder, pod))

    assert again.code == 0, again.output
    (resumed,) = again.of("resumed")
    assert resumed["step"] == stopped.of("stopped")[0]["step"]
    assert json.loads((nodes_folder / "pod" / "results.json").read_text())["resumed_after"]
