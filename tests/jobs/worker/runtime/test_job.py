"""A job of one function, and what the runtime adds to it, on two ranks."""

from __future__ import annotations

import io
import json
import os
import signal
import textwrap
from pathlib import Path
from typing import Any

import pytest

from jobs.worker.runtime.cores import read_cores
from jobs.worker.runtime.events import Events, parse_event
from jobs.worker.runtime.job import _explain
from jobs.worker.runtime.ranks import ASKED
from tests.harness.forked import Forked
from tests.jobs.worker.training.test_run import LOOPBACK, Ended, finish, run_ranks

JOB = """
    import argparse, os, signal
    import torch
    from .runtime.context import RankContext
    from .runtime.errors import TrainingError
    from .runtime.job import run_job
    from .runtime.process import leave

    def train(context):
        if context.options.fail:
            raise TrainingError("the loss is infinite", hint="lower it")
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
        with context.phase("train"), context.report_steps(total=6, per_epoch=3) as report:
            for step in range(1, 7):
                with context.autocast():
                    loss = model(torch.full((8, 4), float(context.ranks.rank))).square().mean()
                loss.backward()
                if step == context.options.stop_after and context.ranks.rank == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                report.step(loss=float(loss), samples=8, lr=0.5)
        return {"accuracy": 0.5}

    if __name__ == "__main__":
        parser = argparse.ArgumentParser()
        parser.add_argument("--stop-after", type=int)
        parser.add_argument("--fail", action="store_true")
        leave(run_job(train, parser.parse_args()))
"""


@pytest.fixture
def toy(node: Path, node_environ: dict[str, str]) -> Path:
    """A node that has the job as a module."""
    (node / "code/worker/toy.py").write_text(textwrap.dedent(JOB))
    return node


def run_two(node: Path, *argv: str) -> list[Ended]:
    # Each node has one of the names.
    own = {"GLOO_SOCKET_IFNAME": "ens5,lo,enp2s0", "SPR_BACKEND": "gloo"}
    return run_ranks(node, [["-m", "worker.toy", *argv]] * 2, more=own)


def read_steps(node: Path, rank: int) -> list[dict[str, Any]]:
    lines = (node / f"output.state/metrics/rank-{rank}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_job_gets_events_metrics_logs_and_results(toy: Path) -> None:
    first, second = run_two(toy)

    assert (first.code, second.code) == (0, 0), first.output + second.output
    assert second.events == [], "only rank 0 prints events"
    results = json.loads((toy / "output/results.json").read_text())
    (said,) = first.of("result")
    assert said.pop("at") > 1.7e9
    assert said == {"event": "result", **results}
    assert results["accuracy"] == 0.5
    assert results["world_size"] == len(results["ranks"]) == 2
    assert list(results["seconds"]) == ["train", "total"]
    assert {"dtype", "versions", "amx"} <= results.keys()
    assert (results["backend"], results["backend_reason"]) == ("gloo", ASKED)
    (start,) = first.of("start")
    assert (start["world_size"], start["backend"]) == (2, "gloo")
    last = first.of("step")[-1]
    assert (last["step"], last["total"], last["epoch"]) == (6, 6, 2.0)
    assert last["samples_per_second"] > 0
    assert sum(last["shares"].values()) == pytest.approx(1)
    for rank in range(2):
        steps = read_steps(toy, rank)
        assert [(each["step"], each["samples"], each["lr"]) for each in steps] == [
            (number, 8, 0.5) for number in range(1, 7)
        ]
        assert (toy / f"output.state/logs/rank-{rank}.log").exists()
    assert [s["loss"] for s in read_steps(toy, 0)] == [s["loss"] for s in read_steps(toy, 1)]


def test_sigterm_on_one_rank_stops_all_after_the_same_step(toy: Path) -> None:
    first, second = run_two(toy, "--stop-after=1")

    assert first.code == second.code == 128 + signal.SIGTERM, first.output + second.output
    (stopped,) = first.of("stopped")
    assert (stopped["step"], stopped["total"]) == (2, 6)
    assert first.of("error") + second.of("error") == [], "no rank is missed"
    assert len(read_steps(toy, 0)) == len(read_steps(toy, 1)) == 2
    assert not (toy / "output/results.json").exists()


def test_ranks_of_a_slurm_job_that_share_cores_say_so_and_a_failure_is_one_event(toy: Path) -> None:
    cores = len(read_cores(os.sched_getaffinity(0)))
    torchrun = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "SPR_BACKEND": "gloo"}
    environ = {**os.environ, **LOOPBACK, **torchrun, "LOCAL_WORLD_SIZE": f"{cores + 1}"}
    slurm, pod = (
        finish(Forked(["-m", "worker.toy", "--fail"], toy, {**environ, **more}))
        for more in ({"SLURM_JOB_ID": "7"}, {})
    )

    warning = slurm.of("note")[0]["text"]
    assert f"{cores + 1} x 1 threads do not fit its {cores} cores" in warning
    assert warning.endswith(f"write the job again with --shape cores={cores}")
    assert "not pinned" not in pod.output
    (error,) = pod.of("error")
    assert (error["message"], error["hint"]) == ("the loss is infinite", "lower it")
    assert pod.code == 1
    assert "Traceback" not in pod.output


@pytest.mark.parametrize(
    ("message", "hint"),
    [
        (
            "value cannot be converted to type c10::BFloat16 without overflow",
            "the model can't be computed in bf16: use --dtype fp32",
        ),
        ("boom", "this is a bug in the job or in a library: see the traceback in the log"),
    ],
)
def test_an_unexpected_error_has_a_hint(message: str, hint: str) -> None:
    said = io.StringIO()
    _explain(RuntimeError(message), Events(0, said))
    (error,) = filter(None, map(parse_event, said.getvalue().splitlines()))
    assert (error["message"], error["hint"]) == (f"RuntimeError: {message}", hint)
