"""The embedded cloud as the command line manages it: open, status, stop, reset."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from infra.cloud import Cloud
from infra.errors import CloudError, UsageError
from infra.local.base_image import BaseImage, ensure_base_image, recipe, recipe_hash
from infra.local.host import check_prerequisites
from infra.local.podman import open_podman
from infra.local.resources import (
    LocalResources,
    find_resources,
    remove_resources,
    stop_containers,
)
from infra.local.state import RESET_HINT, STATUS_PATH, ServerAddress, StateFolder
from infra.progress import Progress, Silent
from infra.wait import wait_until

# moto knows one account, and takes any key for it.
CREDENTIALS = ("embedded", "embedded")
_START_S = 180


@dataclass(frozen=True)
class LocalStatus:
    """What exists of this user's embedded cloud."""

    running: bool
    pid: int | None
    endpoint: str | None
    folder: str
    resources: LocalResources
    faults: str | None = None
    """The file of the faults in force."""


def open_local_cloud(region: str, progress: Progress | None = None) -> Cloud:
    """The embedded cloud, started or taken up again first where it does not run.

    Instances that ran when it was stopped run again. Raises :class:`UsageError` where this machine
    can't have one, :class:`CloudError` where it does not start.
    """
    folder = StateFolder.of_user()
    with folder.command_lock():
        # A server that is just being killed may still look alive.
        address, gateway = wait_until(
            f"answer of the embedded cloud ({folder.log})",
            lambda: _find_server(folder, region, progress or Silent()),
            deadline_s=60,
            every_s=0.5,
        )
    return Cloud(
        name="local",
        region=region,
        # NodeContainers see this machine at the gateway's address.
        caller_cidr=lambda: f"{gateway}/32",
        default_stack="upstream",
        billed=False,
        has_amx=False,
        base=recipe_hash(recipe()),
        endpoint_url=address.url,
        credentials=CREDENTIALS,
    )


def _start(folder: StateFolder, region: str, progress: Progress) -> None:
    check_prerequisites()
    _end_server(folder, signal.SIGKILL)
    folder.create()
    podman = open_podman(folder.root)
    base = ensure_base_image(podman, progress)
    with progress.phase("embedded cloud: start"):
        _run_server(folder, region, base)


def _run_server(folder: StateFolder, region: str, base: BaseImage) -> None:
    """Start the server; it returns when it answers, and goes on in the background."""
    command = [sys.executable, "-m", "infra.local.server", str(folder.root), region]
    hint = f"see {folder.log}; {RESET_HINT}"
    with folder.log.open("w") as log:
        try:
            done = subprocess.run(
                [*command, base.reference, base.description],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # From here the package is found, installed or not.
                cwd=Path(__file__).parents[2],
                timeout=_START_S,
            )
        except subprocess.TimeoutExpired:
            raise CloudError(
                f"the embedded cloud did not start within {_START_S} s", hint=hint
            ) from None
    if done.returncode != 0:
        lines = folder.log.read_text().strip().splitlines() or [f"exit code {done.returncode}"]
        raise CloudError(f"the embedded cloud did not start: {lines[-1]}", hint=hint)


def _find_server(
    folder: StateFolder, region: str, progress: Progress
) -> tuple[ServerAddress, str] | None:
    """The running server, started if need be, and this machine's address in a region."""
    if not folder.is_server_alive():
        _start(folder, region, progress)
    address = ServerAddress.read(folder)
    if address is None:
        raise CloudError(f"{folder.server_file} can't be read", hint=RESET_HINT)
    # No proxy stands between this machine and itself.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{address.url}{STATUS_PATH}?region={region}", timeout=_START_S) as answer:
            return address, str(json.load(answer)["gateways"][region])
    except urllib.error.HTTPError as error:
        if error.code == 404:
            raise UsageError(f"unknown region {region!r}") from None
        raise CloudError(
            f"the embedded cloud can't open {region}: {error}", hint=f"see {folder.log}"
        ) from None
    except OSError:
        return None


def status() -> LocalStatus:
    """What there is now; changes nothing and needs no running server."""
    folder = StateFolder.of_user()
    running = folder.is_server_alive()
    address = ServerAddress.read(folder) if running else None
    return LocalStatus(
        running=running,
        pid=address.pid if address else None,
        endpoint=address.url if address else None,
        folder=str(folder.root),
        resources=(
            find_resources(open_podman(folder.root), folder) if _has_podman() else LocalResources()
        ),
        faults=str(folder.faults) if folder.faults.exists() else None,
    )


def stop() -> None:
    """End the server and stop the instances; the state is kept.

    The next command that opens the embedded cloud takes it up: what ran then runs again.
    """
    folder = StateFolder.of_user()
    with folder.command_lock():
        if folder.is_server_alive():
            folder.suspended.touch()
            _end_server(folder, signal.SIGTERM)
        if _has_podman():
            stop_containers(open_podman(folder.root), folder)


def reset(*, keep_base: bool) -> None:
    """Remove everything: server, containers, images, networks, state; from any half-made state.

    The base image goes too, unless ``keep_base`` or another embedded cloud of this machine exists.
    """
    folder = StateFolder.of_user()
    with folder.command_lock():
        _end_server(folder, signal.SIGKILL)
        if _has_podman():
            remove_resources(open_podman(folder.root), folder, keep_base=keep_base)
        shutil.rmtree(folder.root, ignore_errors=True)


def _has_podman() -> bool:
    return shutil.which("podman") is not None


def _end_server(folder: StateFolder, how: signal.Signals) -> None:
    """End the server and wait until it is gone; with SIGKILL also whatever podman it has in hand.

    It is found by its command line, so that it is found with a broken or vanished state folder too.
    """
    for pid in _server_pids(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, how)
        if how == signal.SIGKILL:
            # The server leads a process group of its own.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, how)
    wait_until(
        "end of the embedded cloud's server",
        lambda: None if _server_pids(folder) else True,
        deadline_s=60,
        every_s=0.5,
    )


def _server_pids(folder: StateFolder) -> list[int]:
    wanted = {b"infra.local.server", os.fsencode(folder.root)}
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted <= set((process / "cmdline").read_bytes().split(b"\0")):
                pids.append(int(process.name))
    return pids
