"""What the runtime adds to a job: a warning about its cores, and one event for a failure."""

from __future__ import annotations

import io
import os
from dataclasses import replace
from pathlib import Path

from jobs.worker.runtime.cores import read_cores
from jobs.worker.runtime.events import Events
from jobs.worker.runtime.job import _explain
from tests.harness.forked import Forked
from tests.jobs.worker.forked_ranks import events_of
from tests.jobs.worker.training.test_run import LOOPBACK, finish, small, squad_argv


def test_ranks_of_a_slurm_job_that_share_cores_say_so_and_a_failure_is_one_event(
    nodes_folder: Path,
) -> None:
    cores = len(read_cores(os.sched_getaffinity(0)))
    torchrun = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    environ = {**os.environ, **LOOPBACK, **torchrun, "LOCAL_WORLD_SIZE": f"{cores + 1}"}
    argv = squad_argv(replace(small(nodes_folder, "out", 4), data="none.json"))
    slurm, pod = (
        finish(Forked(argv, nodes_folder, {**environ, **more}))
        for more in ({"SLURM_JOB_ID": "7"}, {})
    )

    warning = slurm.of("note")[0]["text"]
    assert f"{cores + 1} x 1 threads do not fit its {cores} cores" in warning
    assert warning.endswith(f"write the job again with --shape cores={cores}")
    assert "not pinned" not in pod.output
    (error,) = pod.of("error")
    assert "none.json: can't be read" in error["message"]
    assert pod.code == 1
    assert "Traceback" not in pod.output


def test_an_unexpected_error_has_a_hint() -> None:
    for message, hint in (
        ("value cannot be converted to type c10::BFloat16 without overflow", "use --dtype fp32"),
        ("boom", "this is a bug in the job or in a library: see the traceback in the log"),
    ):
        said = io.StringIO()
        _explain(RuntimeError(message), Events(0, said))
        (error,) = events_of(said.getvalue(), "error")
        assert error["message"] == f"RuntimeError: {message}"
        assert error["hint"].endswith(hint)
