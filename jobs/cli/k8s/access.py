"""Which Kubernetes cluster and namespace a command is about."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.local_files import home
from infra.errors import UsageError
from infra.files import parse_as, read_text

if TYPE_CHECKING:
    from jobs.launchers.kubernetes.api import KubernetesApi
    from jobs.launchers.kubernetes.launcher import KubernetesLauncher

NAMESPACE_HELP = "Kubernetes namespace (default: that of the context)"
OBJECT_NAME = r"(?=.{1,253}$)[a-z0-9]([a-z0-9.-]*[a-z0-9])?"
_OPTIONS = ("namespace", "context", "kubeconfig")


@dataclass(frozen=True)
class KubernetesAccess:
    """A cluster and namespace; and of a job that this machine submitted, where its files are."""

    context: str | None = None
    kubeconfig: str | None = None
    namespace: str | None = None
    claim: str | None = None
    image: str | None = None
    pull_secret: str | None = None


def add_access_options(parser: argparse.ArgumentParser, *, namespace: bool = True) -> None:
    """Add ``--context``, ``--kubeconfig``, and, unless the command has it, ``--namespace``."""
    add = parser.add_argument_group("jobs on Kubernetes").add_argument
    add("--context", metavar="NAME", help="context of the kubeconfig (default: the current one)")
    add("--kubeconfig", metavar="FILE", help="default: KUBECONFIG, else ~/.kube/config")
    if namespace:
        add("--namespace", type=object_name, metavar="NAME", help=NAMESPACE_HELP)


def object_name(text: str) -> str:
    """Parse a name; a ``type`` for argparse. Names become parts of paths."""
    if text and not re.fullmatch(OBJECT_NAME, text):
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected lower-case letters, digits, dashes, and dots"
        )
    return text


def find_access(args: argparse.Namespace) -> KubernetesAccess | None:
    """Return the place of a job on Kubernetes; ``None`` if neither options nor its submission name one.

    Raises :class:`UsageError` for options of both kinds of clusters.
    """
    names = (*_OPTIONS, "claim", "image", "pull_secret")
    given = {name: value for name in names if isinstance(value := getattr(args, name, None), str)}
    if args.name or args.cloud or args.region:
        if given:
            raise UsageError(
                f"--{next(iter(given)).replace('_', '-')} is for jobs on Kubernetes: "
                "omit --name, --cloud, and --region"
            )
        return None
    note = _read_note(args.job) if args.job else None
    return (
        KubernetesAccess(**{**asdict(note or KubernetesAccess()), **given})
        if note or given
        else None
    )


def remember_job(job: str, access: KubernetesAccess) -> None:
    """Note on this machine where a job is, so that its ID is enough for later commands."""
    with suppress(OSError):
        path = _note(job)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(access)) + "\n", encoding="utf-8")


def _note(job: str) -> Path:
    return home() / ".kubernetes" / f"{job}.json"  # no cluster can have this name


def _read_note(job: str) -> KubernetesAccess | None:
    path = _note(job)
    with suppress(UsageError):
        return parse_as(KubernetesAccess, read_text(path), str(path))
    return None


def open_kubernetes(access: KubernetesAccess, args: argparse.Namespace) -> KubernetesLauncher:
    """Return the launcher for a place."""
    module = import_module("jobs.launchers.kubernetes.launcher")
    known = None
    if args.job and access.claim and access.image:
        known = module.SubmittedJob(args.job, access.claim, access.image, access.pull_secret)
    found: KubernetesLauncher = module.KubernetesLauncher(
        open_api(access), access_flags(args).strip(), known
    )
    return found


def open_api(access: KubernetesAccess | argparse.Namespace) -> KubernetesApi:
    """Return the API of the chosen cluster. Raises :class:`UsageError` without the client library."""
    try:
        found: KubernetesApi = import_module("jobs.launchers.kubernetes.kubeconfig").connect(
            access.kubeconfig, access.context, access.namespace
        )
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("kubernetes", "websocket"):
            raise
        raise UsageError(
            "the Python package kubernetes is not installed",
            hint="in spr-cluster's checkout: pip install '.[k8s]'",
        ) from error
    return found


def access_flags(args: argparse.Namespace) -> str:
    """Return the options that choose the cluster, for the next command; with a leading space."""
    words = [[f"--{name}", value] for name in _OPTIONS if (value := getattr(args, name))]
    return "".join(f" {shlex.join(pair)}" for pair in words)
