"""The cloud that hosts a cluster: AWS, or the embedded cloud."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import boto3

DEFAULT_REGION = "us-east-1"


@dataclass(frozen=True)
class Cloud:
    """An endpoint that speaks EC2, and its defaults.

    ``caller_cidr`` returns the address from which the cloud sees this machine, and ``probe_ssh`` why
    this machine's own network lets no connection out to port 22 ("" if it does, or if that is not known).
    """

    name: str
    region: str
    caller_cidr: Callable[[], str] = field(repr=False)
    billed: bool
    """Machines cost money, so the user confirms each purchase first."""
    has_amx: bool
    """Machines should have AMX. If false, missing AMX does not stop ``up``."""
    probe_ssh: Callable[[], str] = field(default=str, repr=False)
    default_bake: str = "head"
    """The fastest route to installed nodes without an image: see ``ClusterSpec.bake``."""
    base: str = ""
    """The machines' base system, if it is more than an Ubuntu release."""
    folder: str = ""
    """Where an embedded cloud keeps its state: this machine can have several."""
    endpoint_url: str | None = None
    credentials: tuple[str, str] | None = field(default=None, repr=False)
    session: boto3.session.Session | None = field(default=None, repr=False, compare=False)
    """The user's AWS session, which all regions share."""
