"""Where a cluster lives: AWS, or the embedded cloud. The rest of the code sees only this value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

DEFAULT_REGION = "us-east-1"


@dataclass(frozen=True)
class Cloud:
    """An endpoint that speaks EC2, and the defaults that suit it.

    ``caller_cidr`` finds the address that this machine has in the cloud's eyes.
    """

    name: str
    region: str
    caller_cidr: Callable[[], str] = field(repr=False)
    default_stack: str
    billed: bool
    """Machines cost money: what will be bought is shown and confirmed first."""
    has_amx: bool
    """Machines can be expected to have AMX; where they can't, its absence does not stop ``up``."""
    default_bake: str = "head"
    """The quicker way to nodes with software where there is no image: see ``ClusterSpec.bake``."""
    base: str = ""
    """Names what machines start from, where that is more than an Ubuntu release."""
    endpoint_url: str | None = None
    credentials: tuple[str, str] | None = field(default=None, repr=False)
