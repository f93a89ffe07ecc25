"""Management of the embedded cloud: open, status, stop, reset. Labels identify its podman resources."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra.aws.cloud import Cloud
from infra.errors import CloudError, SprError, UsageError
from infra.files import parse_object, read_text
from infra.local.machines.base_image import (
    BASES,
    DEFAULT_BASE,
    DESCRIPTION_LABEL,
    REPOSITORY,
    BaseImage,
    ensure_base_image,
    recipe,
    recipe_hash,
)
from infra.local.machines.containers import at_once
from infra.local.machines.host import check_pip_sources, check_prerequisites, check_root
from infra.local.machines.podman import (
    CLOUD_LABEL,
    INSTANCE_LABEL,
    REGION_LABEL,
    Podman,
    open_podman,
)
from infra.local.state import (
    RESET_HINT,
    STATUS_PATH,
    ServerAddress,
    StateFolder,
    release_of,
    snapshot_release,
)
from infra.wait import Progress, Silent, wait_until


@dataclass(frozen=True)
class LocalInstance:
    """An instance as its container shows it."""

    id: str
    region: str
    state: str


@dataclass(frozen=True)
class LocalResources:
    """Networks with their ranges, instances, images created here, and the shared base images."""

    networks: dict[str, str] = field(default_factory=dict)
    instances: tuple[LocalInstance, ...] = ()
    images: tuple[str, ...] = ()
    base_images: tuple[str, ...] = ()


def find_resources(podman: Podman, folder: StateFolder) -> LocalResources:
    """List the resources of this cloud."""
    return LocalResources(
        networks={
            network.name: ", ".join(map(str, network.ranges))
            for network in podman.networks()
            if network.labels.get(CLOUD_LABEL) == folder.key
        },
        instances=tuple(
            LocalInstance(
                container.labels.get(INSTANCE_LABEL, container.name),
                container.labels.get(REGION_LABEL, ""),
                "running" if container.running else "stopped",
            )
            for container in podman.containers(f"{CLOUD_LABEL}={folder.key}")
        ),
        images=tuple(sorted(path.name for path in folder.images.glob("ami-*"))),
        base_images=tuple(podman.images(f"{REPOSITORY}:*")),
    )


def stop_containers(podman: Podman, folder: StateFolder) -> None:
    """Shut down this cloud's containers, and record which ones were running."""
    own = podman.containers(f"{CLOUD_LABEL}={folder.key}")
    running = [container.name for container in own if container.running]
    if running:
        folder.create()
        with folder.suspended.open("a") as file:
            file.writelines(f"{name}\n" for name in running)
    at_once(podman.stop, running)


def remove_resources(podman: Podman, folder: StateFolder, *, keep_base: bool) -> None:
    """Remove this cloud from podman, and the base images unless another cloud exists."""
    podman.remove(c.name for c in podman.containers(f"{CLOUD_LABEL}={folder.key}"))
    networks = podman.networks()
    own = [n.name for n in networks if n.labels.get(CLOUD_LABEL) == folder.key]
    podman.remove_networks(own)
    # Every embedded cloud has a network.
    others = [n for n in networks if CLOUD_LABEL in n.labels and n.name not in own]
    if not keep_base and not others:
        for image in podman.images(f"{REPOSITORY}:*"):
            # If another container uses the image, it stays, and `local status` lists it.
            with contextlib.suppress(CloudError):
                podman.remove_image(image)
        # A rebuild may have taken over the name of an image that was in use.
        podman.prune_images(DESCRIPTION_LABEL)


_START_S, _END_S = 180, 60


@dataclass(frozen=True)
class LocalStatus:
    """This user's embedded cloud."""

    running: bool
    pid: int | None
    endpoint: str | None
    folder: str
    resources: LocalResources


def open_local_cloud(region: str, progress: Progress | None = None) -> Cloud:
    """Open the embedded cloud; start or resume it first if necessary.

    Resuming restarts the instances that were running. Raises :class:`UsageError` if this machine can't
    run the embedded cloud, and :class:`CloudError` if it does not start.
    """
    folder, shown = StateFolder.of_user(), progress or Silent()
    busy = "embedded cloud: another command is starting or stopping it"
    with (
        contextlib.ExitStack() as waiting,
        folder.command_lock(lambda: waiting.enter_context(shown.phase(busy))),
    ):
        waiting.close()
        # A server that is being killed may still appear alive.
        address, found = wait_until(
            f"answer of the embedded cloud ({folder.log})",
            lambda: _find_server(folder, region, shown),
            deadline_s=60,
            every_s=0.5,
        )
    return Cloud(
        name="local",
        region=region,
        # Nodes see this machine at the gateway's address.
        caller_cidr=lambda: f"{found['gateway']}/32",
        billed=False,
        has_amx=False,
        base=found["release"][1],  # as release_of returns it
        settle_s=1.0,
        folder=str(folder.root),
        endpoint_url=address.url,
        credentials=folder.credentials(),
    )


def _base(folder: StateFolder) -> str:
    """Return the base that `local reset --base` chose for this cloud."""
    name = read_text(folder.base_file, DEFAULT_BASE)
    return name if name in BASES else DEFAULT_BASE


def _prepare(folder: StateFolder, progress: Progress) -> BaseImage:
    """Check what a server needs, and return the image that its machines start from."""
    check_prerequisites()
    check_pip_sources()
    folder.create()
    return ensure_base_image(open_podman(folder.root), progress, _base(folder))


def _start(folder: StateFolder, region: str, progress: Progress) -> None:
    base = _prepare(folder, progress)
    _end_server(folder, signal.SIGKILL)
    with progress.phase("embedded cloud: start"):
        _run_server(folder, region, base)


def _run_server(folder: StateFolder, region: str, base: BaseImage) -> None:
    """Start the server. Its command returns once the server is ready, which continues in the background."""
    command = [sys.executable, "-m", "infra.local.api.server", str(folder.root), region]
    hint = f"see {folder.log}; {RESET_HINT}"
    with folder.log.open("w") as log:
        try:
            done = subprocess.run(
                [*command, base.reference, base.description],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # From here, Python finds the package even if it is not installed.
                cwd=Path(__file__).parents[2],
                timeout=_START_S,
            )
        except subprocess.TimeoutExpired:
            raise CloudError(
                f"the embedded cloud did not start within {_START_S} s", hint=hint
            ) from None
    if done.returncode != 0:
        lines = folder.log.read_text(errors="replace").strip().splitlines() or [
            f"exit code {done.returncode}"
        ]
        raise CloudError(f"the embedded cloud did not start: {lines[-1]}", hint=hint)


def _find_server(
    folder: StateFolder, region: str, progress: Progress
) -> tuple[ServerAddress, dict[str, Any]] | None:
    """Return the server, after starting it if necessary, and its answer about a region.

    Returns ``None`` while the server does not answer.
    """
    if not _server_pids(folder):
        _start(folder, region, progress)
    address = ServerAddress.read(folder)
    if address is None:
        raise CloudError(f"{folder.server_file} can't be read", hint=RESET_HINT)
    try:
        found = _ask(folder, address, f"{STATUS_PATH}?region={region}")
    except urllib.error.HTTPError as error:
        with error:
            reason = _reason(error)
        if error.code == 404:
            raise UsageError(f"unknown region {region!r}") from None
        raise CloudError(
            f"the embedded cloud can't open {region}: {reason}", hint=f"see {folder.log}"
        ) from None
    except OSError:
        return None
    # Another format's server has state that only it can load: the user may still need its buckets.
    is_loadable = found.get("snapshots") == list(snapshot_release())
    if is_loadable and found["release"] != release_of(recipe_hash(recipe(_base(folder)))):
        containers = open_podman(folder.root).containers(f"{CLOUD_LABEL}={folder.key}")
        if not any(container.running for container in containers):
            # The current release's server continues from the saved state, if it can start and this one can
            # save it.
            try:
                _prepare(folder, progress)
                _end_server(folder, signal.SIGTERM)
            except SprError as error:
                logging.info("the embedded cloud's server stays: %s", error)
            else:
                return _find_server(folder, region, progress)
    return address, found


def _ask(folder: StateFolder, address: ServerAddress, page: str) -> dict[str, Any]:
    """Return the server's answer. Raises :class:`OSError`, such as ``HTTPError``."""
    # Loopback needs no proxy.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    opener.addheaders = [("Authorization", f"Bearer {folder.credentials()[1]}")]
    with opener.open(f"{address.url}{page}", timeout=_START_S) as answer:
        return dict(json.load(answer))


def _reason(error: urllib.error.HTTPError) -> str:
    """Return the message in an error response of the server."""
    with contextlib.suppress(UsageError):
        return str(parse_object(error.read().decode(errors="replace"), "")["message"])
    return str(error)


def status() -> LocalStatus:
    """Return the current status. Works without a server and changes nothing."""
    folder = StateFolder.of_user()
    running = bool(_server_pids(folder))
    address = ServerAddress.read(folder) if running else None
    podman = open_podman(folder.root) if _has_podman() else None
    return LocalStatus(
        running=running,
        pid=address.pid if address else None,
        endpoint=address.url if address else None,
        folder=str(folder.root),
        resources=find_resources(podman, folder) if podman else LocalResources(),
    )


def stop() -> None:
    """Stop the server and the instances; the next command that uses this cloud restarts them."""
    check_root()
    folder = StateFolder.of_user()
    with folder.command_lock():
        _end_server(folder, signal.SIGTERM)
        if _has_podman():
            stop_containers(open_podman(folder.root), folder)


def reset(*, keep_base: bool, base: str = DEFAULT_BASE) -> None:
    """Remove the server, containers, images, networks, and state, even damaged ones.

    Keeps the state if podman fails, which raises :class:`CloudError`.
    Also removes the base image, unless ``keep_base`` is set or this machine has another embedded cloud.
    The next cloud's machines start from ``base``.
    """
    check_root()
    folder = StateFolder.of_user()
    with folder.command_lock():
        _end_server(folder, signal.SIGKILL)
        if _has_podman():
            try:
                remove_resources(open_podman(folder.root), folder, keep_base=keep_base)
            except CloudError as error:
                again = "run `spr-cluster local reset` again, which removes the rest"
                raise CloudError(error.message, hint=again) from None
        shutil.rmtree(folder.root, ignore_errors=True)
        if base != DEFAULT_BASE:
            folder.create()
            folder.base_file.write_text(base)


def _has_podman() -> bool:
    # Elsewhere, podman's containers run in a virtual machine, and are not this cloud's.
    return platform.system() == "Linux" and shutil.which("podman") is not None


def _end_server(folder: StateFolder, how: signal.Signals) -> None:
    """Signal the server and wait for its end; SIGKILL also kills its podman commands.

    Finds the server by its command line, so the state folder may be damaged or missing.
    """
    for pid in _server_pids(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, how)
        if how == signal.SIGKILL:
            # The server leads its process group.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, how)
    wait_until(
        f"end of the embedded cloud's server ({folder.log})",
        lambda: None if _server_pids(folder) else True,
        deadline_s=_END_S,
        every_s=0.5,
    )


def _server_pids(folder: StateFolder) -> list[int]:
    expected = {b"infra.local.api.server", os.fsencode(folder.root)}
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = set((process / "cmdline").read_bytes().split(b"\0"))
            # A container on this machine may have its own cloud, in a folder of the same name.
            if expected <= command and (process / "root").samefile("/"):
                pids.append(int(process.name))
    return pids
