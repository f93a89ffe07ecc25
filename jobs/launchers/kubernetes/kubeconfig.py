"""From a kubeconfig to the API of one of its contexts."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import yaml
from kubernetes.client import ApiClient, Configuration
from kubernetes.config import ConfigException
from kubernetes.config.kube_config import KubeConfigLoader, KubeConfigMerger

from infra.errors import UsageError
from jobs.launchers.kubernetes.api import KubernetesApi

_DEFAULT = "~/.kube/config"
# What the client raises for a file with another content.
_DAMAGE = (ConfigException, yaml.YAMLError, AttributeError, LookupError, TypeError, ValueError)


def connect(kubeconfig: str | None, context: str | None, namespace: str | None) -> KubernetesApi:
    """Return the API of a context, by default the current one. It sends nothing.

    Raises :class:`UsageError` for a kubeconfig that is missing or damaged, and for a credentials plugin
    that fails.
    """
    path = kubeconfig or os.environ.get("KUBECONFIG") or _DEFAULT
    files = [Path(each).expanduser() for each in path.split(os.pathsep) if each]
    if not any(file.is_file() for file in files):
        raise UsageError(
            f"no kubeconfig: {path} doesn't exist",
            hint="your cluster's provider makes one; name it with --kubeconfig or KUBECONFIG",
        )
    configuration = Configuration()
    # urllib3 would repeat requests that are not ours to repeat.
    configuration.retries = False
    with _errors_of_plugins() as errors:
        found = _load(path, context, configuration)
    if errors:
        reason = " ".join(errors[0].getMessage().split())
        raise UsageError(
            f"context {found['name']}: its credentials plugin failed: {reason}",
            hint="log in to the cluster again",
        )
    chosen = namespace or (found.get("context") or {}).get("namespace") or "default"
    return KubernetesApi(ApiClient(configuration), str(found["name"]), str(chosen))


def _load(path: str, context: str | None, configuration: Configuration) -> Any:
    """Fill the client's configuration; return the context."""
    try:
        merged = KubeConfigMerger(path)
        known = [each["name"] for each in merged.config.value["contexts"]]
        if context and context not in known:
            hint = f"it has {', '.join(map(str, known)) or 'none'}"
            raise UsageError(f"--context {context}: {path} has no such context", hint=hint)
        loader = KubeConfigLoader(
            merged.config, context, config_base_path=None, config_persister=merged.save_changes
        )
        loader.load_and_set(configuration)
        if not loader.current_context["context"].get("cluster"):
            raise ConfigException("the context names no cluster")
        return loader.current_context
    except _DAMAGE as error:
        raise UsageError(
            f"{path}: {' '.join(str(error).split()) or type(error).__name__}",
            hint="`kubectl config get-contexts` lists the contexts, --context chooses one",
        ) from error


@contextmanager
def _errors_of_plugins() -> Iterator[list[logging.LogRecord]]:
    """Collect what the client logs about a plugin that fails: it raises nothing."""
    collector, root = BufferingHandler(capacity=1000), logging.getLogger()
    collector.setLevel(logging.ERROR)
    root.addHandler(collector)
    try:
        yield collector.buffer
    finally:
        root.removeHandler(collector)
