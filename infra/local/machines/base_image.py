"""The base image that replaces Canonical's: from a container registry, or else from a package mirror."""

from __future__ import annotations

import hashlib
import platform
import re
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from infra.errors import CloudError, UsageError
from infra.files import read_text
from infra.local.machines.podman import Podman
from infra.local.state import machine_lock
from infra.wait import Progress

REPOSITORY = "localhost/spr-cluster-base"
DESCRIPTION_LABEL = "org.spr-cluster.description"
RECIPE_FOLDER = Path(__file__).parent / "base"
_PACKAGES = (
    "systemd systemd-sysv dbus openssh-server openssh-client cloud-init sudo python3-venv "
    "iproute2 ca-certificates procps netbase util-linux less "
    # Large, and required by stacks on every node.
    "g++ python3-dev slurm-wlm munge curl rsync"
)  # fmt: skip

# A single layer: removing an image without parents leaves nothing behind.
_BUILD_OPTIONS = (
    *("--quiet", "--pull=never", "--isolation=chroot", "--network=host"),
    *("--layers=false", "--squash-all"),
)
_REGISTRY = "https://registry-1.docker.io/v2/"
_REGISTRY_TIMEOUT_S = 4
_PULL_S = 600.0
_BOOTSTRAP_S = 1200.0
_BUILD_S = 1200.0
_SETTLE_S = 10.0
_CLEANUP_S = 120.0
_APT = Path("/etc/apt")


@dataclass(frozen=True)
class Distribution:
    """What a base image is made of: ``image`` in a registry, or else Debian or Ubuntu packages."""

    name: str
    image: str
    packages: str
    release: str = ""
    """The Debian release to install; empty: the host's own distribution."""


DEFAULT_BASE = "ubuntu"
BASES = {
    DEFAULT_BASE: Distribution("Ubuntu 24.04", "docker.io/library/ubuntu:24.04", _PACKAGES),
    # As on Ubuntu 24.04: sessions (logind), sshd that starts with the first connection, a recent Slurm.
    "debian13": Distribution(
        "Debian 13",
        "docker.io/library/debian:13",
        f"{_PACKAGES} libpam-systemd unattended-upgrades",
        "trixie",
    ),
}


def recipe(base: str = DEFAULT_BASE) -> dict[str, str]:
    """Return the recipe's files by name, with the package list filled in."""
    files = {p.name: p.read_text() for p in sorted(RECIPE_FOLDER.iterdir()) if p.is_file()}
    packages = BASES[base].packages
    return {name: text.replace("@PACKAGES@", packages) for name, text in files.items()}


def recipe_hash(files: dict[str, str]) -> str:
    """Return a hash of the recipe, which becomes its image's tag."""
    digest = hashlib.sha256(repr((bootstrap_command([], "", ""), _BUILD_OPTIONS)).encode())
    for name, text in sorted(files.items()):
        digest.update(f"{name}\0{text}\0".encode())
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class BaseImage:
    """A base image in podman; ``description`` names the distribution in it."""

    reference: str
    description: str

    @property
    def ami_id(self) -> str:
        return f"ami-0{self.reference.rsplit(':', 1)[1]}"


def ensure_base_image(podman: Podman, progress: Progress, base: str = DEFAULT_BASE) -> BaseImage:
    """Return the base image of the current recipe; build it if necessary (over a minute)."""
    reference = f"{REPOSITORY}:{recipe_hash(recipe(base))}"
    if not podman.images(reference):
        with (
            progress.phase("embedded cloud: base image (once per machine)"),
            machine_lock("base", lambda: progress.note("another process is building it; waiting")),
        ):
            if not podman.images(reference):
                _build(podman, base, reference, progress)
    return BaseImage(reference, podman.image_label(reference, DESCRIPTION_LABEL))


def _build(podman: Podman, base: str, reference: str, progress: Progress) -> None:
    had = podman.images(BASES[base].image)
    root, description = _fetch_root(podman, BASES[base], reference, progress)
    progress.note("configuring")
    try:
        with tempfile.TemporaryDirectory() as folder:
            for file, text in recipe(base).items():
                (Path(folder) / file).write_text(text)
            podman.call(
                *("build", *_BUILD_OPTIONS, f"--label={DESCRIPTION_LABEL}={description}"),
                *(f"--build-arg=ROOT={root}", f"--tag={reference}", folder),
                timeout_s=_BUILD_S,
            )
    finally:
        if root not in had:
            podman.remove_image(root)


def _fetch_root(
    podman: Podman, wanted: Distribution, reference: str, progress: Progress
) -> tuple[str, str]:
    """Import a plain system into podman; return its image name and the base image's description."""
    if is_registry_reachable():
        progress.note(f"pulling {wanted.image}")
        try:
            podman.call("pull", "--quiet", wanted.image, timeout_s=_PULL_S)
        except CloudError as error:
            progress.note(error.message)
        else:
            return wanted.image, f"embedded base, {wanted.name}"
    system = read_os_release()
    name = f"{system.get('NAME', 'Linux').split()[0]} {system.get('VERSION_ID', '')}".strip()
    description = f"{name} in place of {wanted.name}"
    if wanted.release:
        name = description = wanted.name
    progress.note(f"no container registry offers {wanted.name}: installing {name} from its mirror")
    root = f"{reference}-root"
    _bootstrap(podman, root, wanted, system)
    return root, f"embedded base, {description}"


def is_registry_reachable() -> bool:
    """Return whether the registry with Ubuntu's images answers within seconds."""
    try:
        urllib.request.urlopen(_REGISTRY, timeout=_REGISTRY_TIMEOUT_S).close()
    except urllib.error.HTTPError as answer:
        # A registry requests authentication with 401; a 403 or 407 comes from a proxy.
        with answer:
            return answer.code == 401
    except OSError:
        return False
    return True


def read_os_release(path: Path = Path("/etc/os-release")) -> dict[str, str]:
    """Return the host's os-release values."""
    text = read_text(path, "", errors="replace")
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {key: value.strip("\"'") for key, _, value in pairs}


# Bootstrapping from the host's package mirror


def apt_sources(folder: Path, codename: str) -> list[str]:
    """Return the host's package mirrors as one-line sources, without third-party ones."""
    lines: list[str] = []
    for file in [folder / "sources.list", *sorted((folder / "sources.list.d").glob("*"))]:
        if file.suffix == ".sources":
            lines += _deb822_sources(read_text(file, errors="replace"))
        elif file.suffix == ".list" and file.is_file():
            lines += [line.strip() for line in read_text(file, errors="replace").splitlines()]
    return [line for line in lines if _is_distribution_source(line, codename)]


def _deb822_sources(text: str) -> list[str]:
    """Return the stanzas of a deb822 file as one-line sources: https://manpages.debian.org/sources.list.5"""
    lines = []
    for stanza in re.split(r"\n\s*\n", text):
        kept = "\n".join(line for line in stanza.splitlines() if not line.startswith("#"))
        fields = {
            key.lower(): " ".join(value.split())
            for key, value in re.findall(r"^([\w-]+):(.*(?:\n[ \t].*)*)", kept, re.MULTILINE)
        }
        if fields.get("enabled", "yes").lower() == "no" or "deb" not in fields.get("types", ""):
            continue
        key = fields.get("signed-by", "")
        option = f"[signed-by={key}] " if key.startswith("/") else ""
        lines += [
            f"deb {option}{uri} {suite} {fields.get('components', '')}".rstrip()
            for uri in fields.get("uris", "").split()
            for suite in fields.get("suites", "").split()
        ]
    return lines


def _is_distribution_source(line: str, codename: str) -> bool:
    match = re.match(r"deb\s+(?:\[([^\]]*)\]\s+)?(\S+)\s+(\S+)\s+(.*)", line)
    if not match:
        return False
    options, _, suite, components = match.groups()
    key = re.search(r"signed-by=(\S+)", options or "")
    return (
        suite in {codename, f"{codename}-updates", f"{codename}-security"}
        and "main" in components.split()
        and (key is None or re.search(r"/(debian|ubuntu)-archive-keyring", key[1]) is not None)
    )


def bootstrap_command(sources: Iterable[str], codename: str, packages: str) -> list[str]:
    """Return the mmdebstrap command that writes a small root file system to stdout as a tar archive."""
    return [
        *("mmdebstrap", "--quiet", "--variant=apt", "--mode=root", "--format=tar"),
        f"--include={','.join(packages.split())}",
        '--aptopt=Acquire::Languages "none"',
        # Nodes need no documentation.
        "--dpkgopt=path-exclude=/usr/share/doc/*",
        "--dpkgopt=path-exclude=/usr/share/man/*",
        "--dpkgopt=path-exclude=/usr/share/locale/*",
        "--skip=check/qemu",
        *(codename, "-", *sources),
    ]


def _bootstrap(podman: Podman, root: str, wanted: Distribution, system: dict[str, str]) -> None:
    codename = system.get("VERSION_CODENAME", "")
    sources = apt_sources(_APT, codename)
    usable = ("debian",) if wanted.release else ("debian", "ubuntu")
    if system.get("ID") not in usable or platform.machine() != "x86_64" or not sources:
        systems = " or ".join(name.capitalize() for name in usable)
        raise UsageError(
            f"the embedded cloud can't get a base image: no container registry offers {wanted.name}, "
            f"and this machine is not an x86-64 {systems} with a package mirror",
            hint=f"make {_REGISTRY} reachable, or use a {systems} machine",
        )
    if not shutil.which("mmdebstrap"):
        raise UsageError(
            f"no container registry offers {wanted.name}, so the embedded cloud needs mmdebstrap",
            hint="apt-get install --no-install-recommends mmdebstrap",
        )
    with tempfile.TemporaryFile("w+") as errors:
        if wanted.release:
            # A Debian mirror has all releases.
            sources = [line.replace(codename, wanted.release) for line in sources]
        command = bootstrap_command(sources, wanted.release or codename, wanted.packages)
        _import_output(podman, root, command, errors)


def _import_output(podman: Podman, root: str, command: list[str], errors: IO[str]) -> None:
    """Import the archive that a command writes. Raises :class:`CloudError`, naming the failed program."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors) as maker:
        try:
            podman.call("import", "--quiet", "-", root, stdin=maker.stdout, timeout_s=_BOOTSTRAP_S)
        except CloudError as failure:
            try:
                # A truncated archive is the fault of the program that wrote it.
                status = maker.wait(_SETTLE_S)
            except subprocess.TimeoutExpired:
                # SIGTERM lets it clean up its mounts.
                maker.terminate()
                raise failure from None
        else:
            status = maker.wait(_CLEANUP_S)
    if status != 0:
        podman.remove_image(root)
        errors.seek(0)
        lines = errors.read().strip().splitlines() or [f"exit code {status}"]
        raise CloudError(
            f"{command[0]} could not create the base image: {lines[-1]}",
            hint="check that `apt-get update` works on this machine",
        )
