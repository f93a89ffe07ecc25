"""What the program of a rank finds in its environment, from what mpirun says. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..runtime.errors import BackendError
from ..runtime.ranks import read_identity

# Where this very code is found: the program has modules of its own.
_OURS = ("PYTHONPATH",)


def rank_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Who this rank is, in the words of torch's ``env://``, from those of Hydra (Intel MPI, MPICH).

    https://docs.pytorch.org/docs/stable/distributed.html#environment-variable-initialization.
    Raises :class:`BackendError` where mpirun's variables are not whole.
    """
    identity = read_identity(environ)
    try:
        local = int(environ.get("MPI_LOCALRANKID", "0"))
        beside = int(environ.get("MPI_LOCALNRANKS", "1"))
    except ValueError as error:
        raise BackendError(
            f"MPI_LOCALRANKID and MPI_LOCALNRANKS are not numbers: {error}"
        ) from error
    return {
        "RANK": str(identity.rank),
        "WORLD_SIZE": str(identity.size),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(beside),
    }


def program_environment(
    environ: Mapping[str, str], output: str, own: Sequence[str]
) -> dict[str, str]:
    """The whole environment; ``own`` are the user's ``NAME=VALUE``, which come last."""
    kept = {name: value for name, value in environ.items() if name not in _OURS}
    wished = dict(word.split("=", 1) for word in own)
    return {**kept, **rank_variables(environ), "SPR_OUTPUT": output, **wished}
