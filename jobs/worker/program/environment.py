"""The environment of a rank's program, from its launcher's variables. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..runtime.process import read_identity, read_local_place

# The path to this code, which must not hide the program's own modules.
_OURS = ("PYTHONPATH",)


def rank_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return torch's ``env://`` variables of this rank, from those of its launcher.

    https://docs.pytorch.org/docs/stable/distributed.html#environment-variable-initialization.
    Raises :class:`BackendError` if these are incomplete.
    """
    identity, local = read_identity(environ), read_local_place(environ)
    return {
        "RANK": str(identity.rank),
        "WORLD_SIZE": str(identity.size),
        "LOCAL_RANK": str(local.rank),
        "LOCAL_WORLD_SIZE": str(local.size),
    }


def program_environment(
    environ: Mapping[str, str], output: str, own: Sequence[str]
) -> dict[str, str]:
    """Return the whole environment; the user's ``NAME=VALUE`` words, ``own``, take precedence."""
    kept = {name: value for name, value in environ.items() if name not in _OURS}
    chosen = dict(word.split("=", 1) for word in own)
    return {**kept, **rank_variables(environ), "SPR_OUTPUT": output, **chosen}
