"""What a program gets from its rank: variables, packages, and its output folder. Runs on Python 3.8."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ..runtime.errors import WorkerError
from ..runtime.output import state_folder
from ..runtime.process import explain_kill, read_identity, read_local_place

_IMPORTS = Path(__file__).resolve().parent / "imports"


def make_parser(name: str) -> argparse.ArgumentParser:
    """Return a parser of the arguments that say how programs run on a node."""
    parser = argparse.ArgumentParser(prog=name, allow_abbrev=False)
    parser.add_argument("--folder", required=True, help="the program's working folder")
    parser.add_argument("--output", required=True, help="the folder that SPR_OUTPUT names")
    parser.add_argument("--packages", default="packages", help="folder of the job's own packages")
    parser.add_argument("--imports", default="", help="folders to import from, separated by colons")
    parser.add_argument("--environment", help="a JSON list of the user's NAME=VALUE")
    return parser


def program_environment(
    environ: Mapping[str, str], output: str, own: Sequence[str]
) -> dict[str, str]:
    """Return the whole environment; the user's ``NAME=VALUE`` words, ``own``, take precedence.

    It has the ``env://`` variables for torch, derived from the launcher's:
    https://docs.pytorch.org/docs/stable/distributed.html#environment-variable-initialization.
    Raises :class:`WorkerError` if those are incomplete.
    """
    # The path to this code must not hide the program's own modules.
    kept = {name: value for name, value in environ.items() if name != "PYTHONPATH"}
    identity, local = read_identity(environ), read_local_place(environ)
    ranks = {
        "RANK": str(identity.rank),
        "WORLD_SIZE": str(identity.size),
        "LOCAL_RANK": str(local.rank),
        "LOCAL_WORLD_SIZE": str(local.size),
    }
    detected = {
        "GROUP_RANK": str(identity.rank // local.size),
        # Without a GPU and this, Hugging Face's Trainer and Accelerate train alone in every rank.
        "ACCELERATE_USE_CPU": "true",
        # Lightning reads torch's variables if torchrun seems to have set them, else Slurm's.
        "TORCHELASTIC_RUN_ID": Path(output).parent.name,
    }
    if local.size == 1 and {"MASTER_ADDR", "MASTER_PORT"} <= environ.keys():
        # The defaults of torchrun's own arguments, for a program that it starts on every node.
        detected |= {
            "PET_NNODES": ranks["WORLD_SIZE"],
            "PET_NODE_RANK": ranks["RANK"],
            "PET_MASTER_ADDR": environ["MASTER_ADDR"],
            "PET_MASTER_PORT": environ["MASTER_PORT"],
        }
    chosen = dict(word.split("=", 1) for word in own)
    return {**detected, **kept, **ranks, "SPR_OUTPUT": output, **chosen}


def add_packages(environ: dict[str, str], packages: str, imports: Sequence[str]) -> None:
    """Add a job's own packages, if it has them, and its import folders before the stack's.

    After them comes the folder of ``spr_cluster``.
    """
    here = Path.cwd()
    folders = [str(here / each) for each in (*imports, packages) if each and (here / each).is_dir()]
    before = [environ["PYTHONPATH"]] if environ.get("PYTHONPATH") else []
    environ["PYTHONPATH"] = ":".join([*before, *folders, str(_IMPORTS)])
    bins = [f"{here / each}/bin" for each in ("site", packages) if (here / each / "bin").is_dir()]
    environ["PATH"] = ":".join([*bins, environ.get("PATH", "")])


def start_output(output: Path, work: Path) -> None:
    """Create the folders and, before any program runs, the mark that tells its files from ours."""
    mark = state_folder(output) / "started"
    with suppress(OSError):  # the program's start fails with the reason
        work.mkdir(parents=True, exist_ok=True)  # none of its files may have been sent
    for folder in (output, mark.parent):
        folder.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        mark.touch(exist_ok=False)


def describe_end(name: str, code: int, pid: int | None = None) -> str:
    """Return a program's end in words; ``code`` is as a shell's. If a signal ended it, ``pid`` is its ID."""
    number = code - 128
    if pid is not None:
        return f"{name} was ended by signal {number}{explain_kill(number, pid)}"
    # A shell ends so after its program was ended by a signal.
    known = number in signal.valid_signals()
    after = f", as after signal {number}{explain_kill(number, pid)}" if known else ""
    return f"{name} ended with exit code {code}{after}"


def requested_threads() -> int:
    """Return the number of threads for OpenMP."""
    try:
        return int(os.environ["OMP_NUM_THREADS"])
    except (KeyError, ValueError) as error:
        raise WorkerError(f"OMP_NUM_THREADS is not set to a number: {error}") from error
