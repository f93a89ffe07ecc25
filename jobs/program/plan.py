"""``run``: any program on the nodes of a cluster, placed like a training job."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from infra.errors import UsageError
from jobs.launchers.plan import JobPlan, PlacementOptions
from jobs.program.files import ProgramFiles
from jobs.worker.supervisor.launch import SECRETS
from provision.stacks.stack import Stack

_VARIABLE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=.*", re.DOTALL)
# Set by the placement and the launcher.
_RESERVED = re.compile(
    r"(LOCAL_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|OMP_NUM_THREADS|(SPR|PMI|MPI|I_MPI|CCL_WORKER)_.*"
)


@dataclass(frozen=True)
class ProgramRequest:
    """A program to run. ``results`` receives its output, log, and ``job.json``.

    ``env`` holds ``NAME=VALUE`` words for the program. The placement reserves cores for ``backend``.
    """

    command: tuple[str, ...]
    files: ProgramFiles
    results: Path
    placement: PlacementOptions = field(default_factory=PlacementOptions)
    nodes: int | None = None
    env: tuple[str, ...] = ()
    backend: str = "auto"
    kind: str = "run"
    retries: int = 0


def check_variables(words: Sequence[str]) -> tuple[str, ...]:
    """Return ``NAME=VALUE`` words. Raises :class:`UsageError` for one that the placement sets."""
    for word in words:
        match = _VARIABLE.fullmatch(word)
        if not match:
            raise UsageError(f"--env {word}: expected NAME=VALUE")
        if _RESERVED.fullmatch(match[1]):
            raise UsageError(
                f"--env {match[1]}: the placement sets it for each rank",
                hint="--nodes, --ppn, --placement, and --ccl-workers control it",
            )
    return tuple(words)


def plan_program(request: ProgramRequest, stack: Stack) -> JobPlan:
    """Return a plan in which every rank checks its placement and becomes the program. Pure.

    Variables are sent in a file: mpirun's arguments are visible to all users, and recorded.
    """
    backend = stack.choose_backend(request.backend)
    files: dict[str, Path | bytes] = {"work/.keep": b""}
    files |= {f"work/{name}": path for name, path in request.files.files.items()}
    argv = ["--folder=work", "--output=output"]
    if request.env:
        files[SECRETS] = json.dumps(request.env).encode()
        argv.append(f"--environment={SECRETS}")
    return JobPlan(
        kind=request.kind,
        module="worker.program",
        argv=(*argv, "--", *request.command),
        backend=backend,
        files=files,
        sends=str(request.files),
        placement=request.placement,
        nodes=request.nodes,
        env={"SPR_BACKEND": backend},
        results=request.results,
        retries=request.retries,
        command=request.command,
        details={
            "files": len(request.files.files),
            "bytes": request.files.size,
            "env": [word.partition("=")[0] for word in request.env],
        },
        gather_output=True,
    )
