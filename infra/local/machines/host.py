"""The host: required programs, free address ranges, CPUs, certificates, and pip configuration."""

from __future__ import annotations

import configparser
import importlib.util
import ipaddress
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from infra.errors import MissingExtraError, UsageError
from infra.files import read_text
from infra.local.machines.podman import Mount

IPv4Network = ipaddress.IPv4Network

# EC2's default range first, then its neighbors: https://docs.aws.amazon.com/vpc/latest/userguide/default-vpc-components.html
CANDIDATE_RANGES = tuple(
    ipaddress.IPv4Network(f"{prefix}.0.0/16")
    for prefix in [f"172.{n}" for n in range(31, 15, -1)] + [f"10.{n}" for n in range(200, 250)]
)
CA_BUNDLE = "/etc/ssl/certs/ca-certificates.crt"

_PACKAGES = {
    "podman": "podman",
    "/usr/lib/podman/netavark": "netavark",
    "/usr/lib/podman/aardvark-dns": "aardvark-dns",
    "iptables": "iptables",
    "ip": "iproute2",
}
_HELPER_FOLDERS = ("/usr/lib/podman", "/usr/libexec/podman", "/usr/local/libexec/podman")


def _has_program(name: str) -> bool:
    if name.startswith("/"):
        return any((Path(folder) / Path(name).name).exists() for folder in _HELPER_FOLDERS)
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") is not None


def check_prerequisites() -> None:
    """Raise :class:`UsageError` if a prerequisite of the embedded cloud is missing, with a way to get it."""
    if (system := platform.system()) != "Linux":
        raise UsageError(
            f"the embedded cloud needs Linux (its instances are containers); this is {system}",
            hint="use a Linux machine, or AWS: --cloud aws",
        )
    check_root()
    if missing := sorted({p for name, p in _PACKAGES.items() if not _has_program(name)}):
        packages = sorted({*_PACKAGES.values(), "runc", "mmdebstrap"})
        raise UsageError(
            f"the embedded cloud needs {', '.join(missing)}",
            hint=f"apt-get install --no-install-recommends {' '.join(packages)}",
        )
    if not all(map(importlib.util.find_spec, ("moto", "flask"))):
        raise MissingExtraError("the embedded cloud needs moto, which answers as EC2", "local")


def check_root() -> None:
    """Raise :class:`UsageError` for other users: their podman and folder are not those of the cloud."""
    if os.geteuid() != 0:
        raise UsageError(
            "the embedded cloud needs root, to give its instances addresses",
            hint="run the same command with sudo",
        )


# Addresses


def used_ranges(
    run: Callable[[Sequence[str]], str] | None = None, resolv_conf: Path = Path("/etc/resolv.conf")
) -> list[IPv4Network]:
    """Return the IPv4 ranges of this machine's routes and name servers."""
    text = (run or _output)(["ip", "-json", "-4", "route", "show", "table", "all"])
    routes = [str(route.get("dst", "default")) for route in json.loads(text or "[]")]
    servers = re.findall(
        r"(?m)^nameserver[ \t]+([0-9.]+)", read_text(resolv_conf, "", errors="replace")
    )
    ranges = []
    for text in routes + servers:
        with suppress(ValueError):  # a name such as default, or a damaged line
            ranges.append(ipaddress.IPv4Network(text, strict=False))
    # VPNs write a default route as two halves of the address space.
    return [r for r in ranges if r.prefixlen >= 8]


def _output(command: Sequence[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout


def choose_range(used: Iterable[IPv4Network]) -> IPv4Network:
    """Return the first candidate that overlaps no used range; raises :class:`UsageError`."""
    taken = list(used)
    for candidate in CANDIDATE_RANGES:
        if not any(candidate.overlaps(other) for other in taken):
            return candidate
    raise UsageError(
        "the embedded cloud found no free private address range",
        hint="remove unused container networks: podman network prune",
    )


def gateway_of(network: IPv4Network) -> str:
    """Return the host's address in a range: the first one, which EC2 reserves for the router."""
    return str(network[1])


# CPUs


def choose_cpus(
    count: int, in_use: Iterable[Sequence[int]], available: Sequence[int] | None = None
) -> list[tuple[int, ...]]:
    """Choose CPUs for ``count`` new nodes: the least used quarter of the machine for each."""
    cpus = sorted(os.sched_getaffinity(0)) if available is None else list(available)
    size = max(1, len(cpus) // 4)
    uses = dict.fromkeys(cpus, 0)
    for cpu in (cpu for node in in_use for cpu in node):
        uses[cpu] = uses.get(cpu, 0) + 1
    chosen = []
    for _ in range(count):
        node = tuple(sorted(sorted(cpus, key=lambda cpu: (uses[cpu], cpu))[:size]))
        for cpu in node:
            uses[cpu] += 1
        chosen.append(node)
    return chosen


# pip and certificates

# The options that affect where packages come from. All others (caches, target folders, …) apply only to
# the host.
_ROOT_HOME = Path("/root")
_PIP_OPTIONS = frozenset(
    {
        "cert", "index-url", "extra-index-url", "find-links", "no-index", "trusted-host", "proxy",
        "timeout", "default-timeout", "retries", "prefer-binary", "only-binary", "no-binary",
        "disable-pip-version-check",
    }
)  # fmt: skip


def pip_config_files(environment: Mapping[str, str], home: Path) -> list[Path]:
    """Return pip's configuration files, weakest first: https://pip.pypa.io/en/stable/topics/configuration/"""
    if environment.get("PIP_CONFIG_FILE") == os.devnull:
        return []
    config_home = Path(environment.get("XDG_CONFIG_HOME") or home / ".config")
    files = [
        Path("/etc/xdg/pip/pip.conf"),
        Path("/etc/pip.conf"),
        home / ".pip" / "pip.conf",
        config_home / "pip" / "pip.conf",
    ]
    if virtual := environment.get("VIRTUAL_ENV"):
        files.append(Path(virtual) / "pip.conf")
    if extra := environment.get("PIP_CONFIG_FILE"):
        files.append(Path(extra))
    return files


def merge_pip_config(
    files: Iterable[Path], environment: Mapping[str, str]
) -> configparser.RawConfigParser:
    """Merge this machine's pip settings about package sources: files, then `PIP_…` variables."""
    merged = configparser.RawConfigParser(strict=False, default_section="")
    vars(merged)["optionxform"] = lambda name: name.lower().removeprefix("--").replace("_", "-")
    merged.add_section("global")
    for file in files:
        try:
            merged.read_string(read_text(file, ""), str(file))
        except configparser.Error as error:
            raise UsageError(f"pip's configuration {file} can't be read: {error}") from None
    for section in merged.sections():
        for name in merged.options(section):
            if name not in _PIP_OPTIONS:
                merged.remove_option(section, name)
    for variable, value in environment.items():
        name = variable.removeprefix("PIP_").lower().replace("_", "-")
        if variable.startswith("PIP_") and name in _PIP_OPTIONS and value:
            # A variable overrides all files, including their sections for single commands.
            for section in merged.sections():
                merged.remove_option(section, name)
            merged.set("global", name, value)
    return merged


def local_sources(config: configparser.RawConfigParser) -> list[Path]:
    """Return the local folders that a configuration uses as package sources."""
    keys = ("find-links", "index-url", "extra-index-url")
    texts = (config.get(section, k, fallback="") for section in config.sections() for k in keys)
    folders: set[Path] = set()
    for entry in " ".join(texts).split():
        is_url = "://" in entry
        path = Path(entry.removeprefix("file://")).expanduser()
        if (is_url and not entry.startswith("file:///")) or not path.is_absolute():
            continue
        # The pages of a simple index link to files next to it.
        folder = path.parent if path.name == "simple" else path
        if folder.exists() and folder != Path("/"):
            folders.add(folder.resolve() if folder.is_symlink() else folder)
    return sorted(folders)


def check_pip_sources(environment: Mapping[str, str] = os.environ) -> None:
    """Raise :class:`UsageError` for a local package source that the nodes' user may not read."""
    config = merge_pip_config(pip_config_files(environment, Path.home()), environment)
    for source in local_sources(config):
        needed = 0o5 if source.is_dir() else 0o4
        is_hidden = _ROOT_HOME in source.parents  # on the nodes as well
        if is_hidden or source.stat().st_mode & needed != needed:
            fix = "move it to /srv" if is_hidden else f"chmod -R o+rX {shlex.quote(str(source))}"
            raise UsageError(
                f"pip's source {source} (find-links or an index of pip.conf or PIP_…) is private, and the "
                "nodes install as another user",
                hint=f"{fix}, or leave it out with PIP_CONFIG_FILE=/dev/null and without the variable",
            )


def ca_bundle(pip_cert: str, environment: Mapping[str, str]) -> Path | None:
    """Return the user's certificate bundle, else the system's, if any."""
    names = ("REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", "CURL_CA_BUNDLE")
    candidates = [pip_cert, *(environment.get(name, "") for name in names)]
    for candidate in [*candidates, CA_BUNDLE]:
        if candidate and Path(candidate).is_file():
            return Path(candidate)
    return None


def node_mounts(pip_conf: Path, environment: Mapping[str, str] = os.environ) -> tuple[Mount, ...]:
    """Write the nodes' pip.conf; return the host's files and folders to mount on every node."""
    config = merge_pip_config(pip_config_files(environment, Path.home()), environment)
    bundle = ca_bundle(config.get("global", "cert", fallback=""), environment)
    # On the node, the host's certificates replace Debian's.
    config.set("global", "cert", CA_BUNDLE)
    with pip_conf.open("w") as file:
        config.write(file)
    pip_conf.chmod(0o644)
    mounts = [Mount(pip_conf, "/etc/pip.conf")]
    if bundle:
        mounts.append(Mount(bundle, CA_BUNDLE))
    return (*mounts, *(Mount(folder, str(folder)) for folder in local_sources(config)))
