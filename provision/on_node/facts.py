"""Describe a node in one line of JSON: facts and health. ``null`` means that the machine has no value.

Its argument is JSON: the paths ``venv`` and ``mark``, and, for the node's health, ``packages`` and
``modules`` whose versions are reported, shell ``commands`` whose output is, and the systemd unit ``warm``
that runs while the disk is read for the first time.
"""

from __future__ import annotations

import ctypes
import errno
import importlib.metadata
import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from provision.on_node.proc import parse_memory, read

# Linux gives a process AMX's registers only on request, from 5.16 on. The numbers are those of
# arch/x86/include/uapi/asm/prctl.h: https://docs.kernel.org/arch/x86/xstate.html
_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18
# adjtimex(2): the offset of `status` in struct timex on x86-64, and its flag for a clock that runs free.
_TIMEX_SIZE, _TIMEX_STATUS, _STA_UNSYNC = 208, 40, 0x40
_ANSWER_S = 15


def output(*argv: str, **env: str) -> str:
    """A command's output; empty if it fails or does not exist."""
    try:
        done = subprocess.run(
            argv,
            env={**os.environ, "LC_ALL": "C", **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_ANSWER_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace") if done.returncode == 0 else ""


def ask_tile_data() -> str:
    """``granted``, or the name of the error with which the kernel refuses AMX's tile registers."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    done = libc.syscall(
        ctypes.c_long(_SYS_ARCH_PRCTL),
        ctypes.c_long(_ARCH_REQ_XCOMP_PERM),
        ctypes.c_long(_XFEATURE_XTILEDATA),
    )
    number = ctypes.get_errno()
    return "granted" if done == 0 else errno.errorcode.get(number, str(number))


def is_clock_kept() -> bool | None:
    """Whether a service such as chrony synchronizes the clock, according to the kernel."""
    buffer = ctypes.create_string_buffer(_TIMEX_SIZE)
    if ctypes.CDLL(None).adjtimex(buffer) < 0:
        return None
    status = ctypes.c_int.from_buffer(buffer, _TIMEX_STATUS).value
    return not status & _STA_UNSYNC


def describe_processor() -> dict[str, Any]:
    """``lscpu``'s output, for placement, and the CPUs that this process may use."""
    text = output("lscpu")
    model = re.search(r"^Model name:\s*(.*)$", text, re.MULTILINE)
    return {
        "model": model.group(1).strip() if model else "unknown",
        "amx": sorted(set(re.findall(r"\bamx_[a-z0-9]+", text))),
        "tile_data": ask_tile_data() if os.uname().machine == "x86_64" else "not x86-64",
        "topology": output("lscpu", "--parse=CPU,Core,Socket,Node"),
        "allowed": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
    }


def find_tcmalloc() -> dict[str, str | None]:
    """The library that jobs preload, and the error if it can't be loaded."""
    # The file's name changes with the release.
    patterns = ("*/libtcmalloc.so.*", "*/libtcmalloc_minimal.so.*")
    names = [str(path) for pattern in patterns for path in Path("/usr/lib").glob(pattern)]
    if not names:
        return {"path": None, "error": None}
    path = sorted(names, key=lambda name: ("minimal" in name, name))[0]
    done = subprocess.run(
        ["/bin/true"],
        env={"LD_PRELOAD": path},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        timeout=_ANSWER_S,
        check=False,
    )
    return {"path": path, "error": done.stderr.decode(errors="replace").strip() or None}


def find_versions(packages: list[str]) -> dict[str, str | None]:
    """Versions of installed packages; ``None`` for a missing one."""
    found: dict[str, str | None] = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def find_module_versions(modules: list[str]) -> dict[str, str | None]:
    """Versions that modules report, read from their files: importing torch takes seconds."""
    found = {}
    for module in modules:
        spec = importlib.util.find_spec(module)
        folder = Path(spec.origin).parent if spec and spec.origin else Path("/nonexistent")
        names = ("version.py", "_version.py", "__init__.py")
        texts = [read(str(folder / name)) for name in names]
        lines = (re.search(r"^__version__\s*(?::.*)?=\s*['\"](.+?)['\"]", t, re.M) for t in texts)
        found[module] = next((line.group(1) for line in lines if line), None)
    return found


def describe_disk() -> dict[str, Any]:
    """Bytes of the root disk, and an error if a job could not write its files."""
    disk = os.statvfs("/")
    error = None
    try:
        with tempfile.TemporaryFile(dir=Path.home()) as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as failure:
        error = failure.strerror or str(failure)
    size = disk.f_blocks * disk.f_frsize
    free = disk.f_bavail * disk.f_frsize
    return {"disk_size": size, "disk_free": free, "disk_error": error}


def describe_network() -> dict[str, Any]:
    """The node's name, and the names and MTUs of its interfaces by address."""
    interfaces = json.loads(output("ip", "-j", "-4", "address", "show") or "[]")
    found = {
        address["local"]: interface
        for interface in interfaces
        for address in interface.get("addr_info", ())
    }
    return {
        "hostname": socket.gethostname(),
        "interfaces": {address: each["ifname"] for address, each in found.items()},
        "mtus": {address: each["mtu"] for address, each in found.items()},
    }


def find_own_addresses(name: str) -> list[str]:
    """The addresses that the node's own name resolves to."""
    try:
        found = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return []
    return sorted({str(entry[4][0]) for entry in found})


def describe_facts(venv: str) -> dict[str, Any]:
    """The facts that jobs and the mesh need, collected quickly and without writing."""
    # As PyPI's intel-openmp leaves it.
    iomp5 = Path(venv, "lib/libiomp5.so")
    tcmalloc, memory = find_tcmalloc(), parse_memory(read("/proc/meminfo"))
    return {
        "kernel": os.uname().release,
        **describe_processor(),
        "memory_total": memory["memory"] // 1024,  # KiB
        "memory_available": memory["available"] // 1024,
        **describe_network(),
        "tcmalloc": tcmalloc["path"],
        "tcmalloc_error": tcmalloc["error"],
        "iomp5": str(iomp5) if iomp5.exists() else None,
        "host_key": " ".join(read("/etc/ssh/ssh_host_ed25519_key.pub").split()[:2]),
    }


def describe(question: dict[str, Any]) -> dict[str, Any]:
    """The facts and, if packages are given, the node's health."""
    facts = describe_facts(question["venv"])
    if "packages" not in question:
        return facts
    return {
        **facts,
        "python": ".".join(map(str, sys.version_info[:3])),
        "in_venv": sys.prefix == question["venv"],
        "mark": read(question["mark"]).strip() or None,
        "versions": find_versions(question["packages"]),
        "modules": find_module_versions(question["modules"]),
        "own_addresses": find_own_addresses(facts["hostname"]),
        "clock_kept": is_clock_kept(),
        **describe_disk(),
        "reading_disk": output("systemctl", "is-active", question["warm"]).strip() == "active",
        "said": {each: output("sh", "-c", each).strip() for each in question["commands"]},
        # Last: the caller compares it with the time of the answer.
        "time": time.time(),
    }


def main() -> None:
    print(json.dumps(describe(json.loads(sys.argv[1]))), flush=True)
