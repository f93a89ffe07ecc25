"""A node's pinning when it has other CPUs than the node for which it was planned, as after `repair`. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from ..runtime.pinning import VARIABLE, format_cpus
from .nodes import parse_cpus

_DOMAIN, _WORKERS = "I_MPI_PIN_DOMAIN", "CCL_WORKER_AFFINITY"


def fit_pinning(env: Mapping[str, str], cpus: Sequence[int]) -> dict[str, str]:
    """Return the pinning on a node whose processes may use ``cpus``: the planned one, if that fits.

    Otherwise, each planned CPU stands for one of the node's, in their order. With too few of them, the
    pinning stays as it is, and a rank reports the difference.
    """
    places = json.loads(env.get(VARIABLE, "[]"))
    planned = sorted(
        {cpu for place in places for key in ("cpus", "workers") for cpu in _cpus(place, key)}
    )
    if not planned or set(planned) <= set(cpus) or len(planned) > len(cpus):
        return dict(env)
    instead = dict(zip(planned, sorted(cpus)))  # noqa: B905 - Python 3.8; the lengths may differ

    def move(text: str) -> str:
        return format_cpus(instead[cpu] for cpu in parse_cpus(text))

    # A memory policy names a NUMA node, which may be another one, too.
    moved = [
        {**place, "cpus": move(place["cpus"]), "workers": move(place["workers"]), "memory": None}
        for place in places
    ]
    masks = [sum(1 << cpu for cpu in parse_cpus(place["cpus"])) for place in moved]
    changed = {
        VARIABLE: json.dumps(moved, separators=(",", ":")),
        _DOMAIN: f"[{','.join(map(hex, masks))}]",
    }
    if _WORKERS in env:
        workers = [instead.get(cpu, cpu) for cpu in parse_cpus(env[_WORKERS])]
        changed[_WORKERS] = ",".join(map(str, workers))
    return {**env, **changed}


def _cpus(place: Mapping[str, str], key: str) -> tuple[int, ...]:
    return parse_cpus(place.get(key) or "")
