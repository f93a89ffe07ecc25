"""What jobs need of this machine's logins: ``--report-to``'s trackers, and the hub's ``--env HF_TOKEN``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from infra.errors import UsageError
from jobs.places.plan import PackageList
from jobs.program.plan import check_variables
from jobs.train.request import expand_home
from jobs.worker.runtime.trackers import choose

HUB_TOKEN = "HF_TOKEN"


class Client(NamedTuple):
    """A tracker's package, and the variables that go to the ranks if this machine has them.

    It needs one of the words in ``needs``: ``NAME`` with any value, or ``NAME=VALUE``.
    """

    package: str
    variables: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


_MLFLOW = ("TRACKING_URI", "TRACKING_TOKEN", "TRACKING_USERNAME", "TRACKING_PASSWORD")
_URI = "MLFLOW_TRACKING_URI"
_SERVERS = {"http", "https", "databricks"}
_CLIENTS = {
    "tensorboard": Client("tensorboard>=2.18,<3"),
    "mlflow": Client(
        # The client alone, without the server.
        "mlflow-skinny>=3.1,<4",
        tuple(f"MLFLOW_{name}" for name in (*_MLFLOW, "EXPERIMENT_NAME", "EXPERIMENT_ID")),
        (_URI,),
    ),
    "wandb": Client(
        "wandb>=0.20,<1",
        tuple(f"WANDB_{name}" for name in ("API_KEY", "MODE", "PROJECT", "ENTITY", "BASE_URL")),
        ("WANDB_API_KEY", "WANDB_MODE=offline"),
    ),
}


def find_hub_token(environ: Mapping[str, str] = os.environ) -> str:
    """Return the token of the local Hugging Face login. Raises :class:`UsageError` if there is none.

    https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables
    """
    cache = environ.get("XDG_CACHE_HOME", "~/.cache")
    home = environ.get("HF_HOME", f"{cache}/huggingface")
    token = environ.get(HUB_TOKEN) or environ.get("HUGGING_FACE_HUB_TOKEN", "")
    with suppress(OSError, ValueError):
        token = token or expand_home(environ.get("HF_TOKEN_PATH", f"{home}/token")).read_text()
    if not token.split():
        raise UsageError(
            "--env HF_TOKEN: no Hugging Face login here",
            hint="hf auth login, or export HF_TOKEN=…",
        )
    return token.strip()


def tracker_packages(report_to: str) -> PackageList | None:
    """Return the clients to install beside the stack; ``None`` for ``auto`` and ``none``."""
    if report_to == "auto":
        return None
    lines = tuple(_CLIENTS[name].package for name in choose(report_to))
    hint = "--report-to none trains without trackers"
    return PackageList(f"--report-to {report_to}", lines, hint=hint) if lines else None


def tracker_needs(report_to: str) -> dict[str, tuple[str, ...]]:
    """Return the variables of which each tracker needs one, by its name."""
    return {name: _CLIENTS[name].needs for name in choose(report_to) if _CLIENTS[name].needs}


def tracker_variables(report_to: str, words: Sequence[str]) -> tuple[str, ...]:
    """Return ``NAME=VALUE`` words with those that the trackers need from this machine.

    The user's own words take precedence. Raises :class:`UsageError` without a login or a server's address.
    """
    given = {word.partition("=")[0]: word for word in words}
    for name in choose(report_to):
        client = _CLIENTS[name]
        new = [each for each in client.variables if os.environ.get(each) and each not in given]
        given |= dict(zip(new, check_variables(new), strict=True))
        has = {*given, *given.values()}
        if client.needs and not has & {*client.needs}:
            raise UsageError(
                f"--report-to {name} needs {' or '.join(client.needs)}",
                hint=f"export {client.needs[0]}=…, give it with --env, or use --report-to none",
            )
        uri = given.get(_URI, "").partition("=")[2].strip()
        kind = uri.partition(":")[0]
        if name == "mlflow" and uri and kind not in _SERVERS:
            # The rest may hold a password.
            raise UsageError(
                f"{_URI}: expected the address of a server, not {kind}",
                hint="the nodes report to an MLflow server; tensorboard writes files to the results",
            )
    return tuple(given.values())
