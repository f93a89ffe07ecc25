"""Parts that the commands share: their options, and the API of the cluster that these choose."""

from __future__ import annotations

import argparse
import re
import shlex
from importlib import import_module
from typing import TYPE_CHECKING

from cluster.cli.parser import add_json_option
from infra.errors import UsageError

if TYPE_CHECKING:
    from jobs.launchers.kubernetes.api import KubernetesApi

NAMESPACE_HELP = "Kubernetes namespace (default: that of the context)"
OBJECT_NAME = r"(?=.{1,253}$)[a-z0-9]([a-z0-9.-]*[a-z0-9])?"


def add_access_options(parser: argparse.ArgumentParser, *, namespace: bool = True) -> None:
    """Add ``--context``, ``--kubeconfig``, and, unless the command has it, ``--namespace``."""
    add = parser.add_argument_group("cluster").add_argument
    add("--context", metavar="NAME", help="context of the kubeconfig (default: the current one)")
    add("--kubeconfig", metavar="FILE", help="default: KUBECONFIG, else ~/.kube/config")
    if namespace:
        add("--namespace", type=object_name, metavar="NAME", help=NAMESPACE_HELP)


def add_job_options(
    parser: argparse.ArgumentParser, *, nargs: str | None = None, json: bool = True
) -> None:
    """Add ``NAME``, a job's, what chooses the cluster, and usually ``--json``."""
    parser.add_argument(
        "job",
        metavar="NAME",
        nargs=nargs,
        type=object_name,
        help="the job's name, as `k8s status` lists it",
    )
    add_access_options(parser)
    if json:
        add_json_option(parser)


def object_name(text: str) -> str:
    """Parse a name; a ``type`` for argparse. Names become parts of paths."""
    if text and not re.fullmatch(OBJECT_NAME, text):
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected lower-case letters, digits, dashes, and dots"
        )
    return text


def open_api(args: argparse.Namespace) -> KubernetesApi:
    """Return the API of the chosen cluster. Raises :class:`UsageError` without the client library."""
    try:
        found: KubernetesApi = import_module("jobs.launchers.kubernetes.kubeconfig").connect(
            args.kubeconfig, args.context, args.namespace
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
    names = ("namespace", "context", "kubeconfig")
    words = [[f"--{name}", value] for name in names if (value := getattr(args, name))]
    return "".join(f" {shlex.join(pair)}" for pair in words)
