"""The images of the node: that of a job's pods, by the steps of its Dockerfile, and the pause image."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from infra.local.machines.base_image import ensure_base_image
from infra.local.machines.host import node_mounts
from infra.local.machines.podman import Podman
from infra.wait import Silent
from tests.e2e.kubernetes.control_plane import BINARIES
from tests.e2e.kubernetes.node import PAUSE

JOB = "localhost/spr-cluster:test"
_BUILD_S = 1800.0


def save_images(build: Path, folder: Path) -> Path:
    """Build a rendered folder's image on the embedded cloud's base, and return an archive of all images.

    podman keeps the layers: only what changed is built again.
    """
    podman = Podman()
    base = ensure_base_image(podman, Silent()).reference
    # Packages come from where this machine has them; pip asks no source twice that is not there.
    mounts = node_mounts(folder / "pip.conf", {**os.environ, "PIP_RETRIES": "0"})
    volumes = [f"--volume={each.source}:{each.target}:ro" for each in mounts]
    options = ("--quiet", "--pull=never", "--isolation=chroot", "--network=host")
    where = (f"--build-arg=BASE={base}", f"--tag={JOB}", str(build))
    podman.call("build", *options, *volumes, *where, timeout_s=_BUILD_S)
    _build_pause(podman, folder / "pause")
    archive = folder / "images.tar"
    podman.call("save", "--quiet", "--multi-image-archive", f"--output={archive}", JOB, PAUSE)
    return archive


def _build_pause(podman: Podman, folder: Path) -> None:
    folder.mkdir()
    shutil.copy(BINARIES / "pause", folder)
    (folder / "Dockerfile").write_text('FROM scratch\nCOPY pause /\nENTRYPOINT ["/pause"]\n')
    podman.call("build", "--quiet", "--isolation=chroot", f"--tag={PAUSE}", str(folder))
