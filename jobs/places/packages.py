"""Install a project's packages beside the stack: resolved here by uv, installed once on the head.

uv installs there as well, or pip if uv fails. uv gets the node's pip configuration as options: it does not
read it by itself (https://docs.astral.sh/uv/pip/compatibility/). Twenty small packages take 3.2 s with uv and
15.1 s with pip, one takes 0.9 s and 3.8 s [two busy cores of an AMD EPYC, 2026-11].

They go to a folder named after what was asked for, before the stack's in the ranks' search path. torch and
the libraries that it and mpirun load stay those of the stack.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import tempfile
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name

from infra.ec2.images import RELEASES
from infra.errors import HostError, UsageError
from infra.words import counted
from jobs.places.plan import JobPaths, PackageList
from provision.host import Host, TextSink
from provision.install import VENV, stack_digest, with_environment
from provision.stacks.sources import (
    NodePython,
    Resolver,
    Sources,
    find_resolver,
    parse_pip_configuration,
)
from provision.stacks.stack import Stack, parse_requirement

_RESOLVE_S, _INSTALL_S = 300, 3600
_LINUX = {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64"}
PROTECTED = re.compile(
    r"torch|impi-rt|mpi4py|oneccl.*|intel-.*|mkl.*|onemkl.*|tbb|tcmlib|umf|impi.*|triton.*|nvidia-.*|cuda-.*"
)
"""The packages that the stack matches with each other, and what only torch for GPUs needs."""
_COMPANIONS = re.compile(r"torch(vision|audio|codec|text)")
"""What loads torch's own libraries: PyPI's builds need those for GPUs, the stack's indexes have others."""
_GPU = re.compile(r"triton.*|nvidia-.*|cuda-.*")
_INSTALLED = (
    "import importlib.metadata as m,json,platform;"
    "import subprocess,sys;c=subprocess.run([sys.executable,'-Im','pip','config','list'],stdout=-1).stdout;"
    "print(json.dumps([platform.python_version(),platform.libc_ver()[1],"
    "{d.metadata['Name']: d.version for d in m.distributions()},c.decode()]))"
)
_INSTALL = """# installing packages
set -e
trap 'rm -f {listed}' EXIT
mkdir -p ~/spr-packages && cd ~/spr-packages
exec 9> .lock && flock 9
[ ! -d {key} ] || {{ touch {key}; exit 0; }}
rm -rf .{key}.new && mkdir .{key}.new && cp {listed} .{key}.new/requirements.txt
pip="{python} -m pip --disable-pip-version-check --quiet --no-input"
[ -x ~/.spr-uv/bin/uv ] || $pip install --no-deps --target ~/.spr-uv uv >/dev/null 2>&1 || true
what="--no-deps --target .{key}.new -r .{key}.new/requirements.txt"
env {variables} ~/.spr-uv/bin/uv --no-config pip install --quiet --python {python} --compile-bytecode \\
  {sources} {options} $what >/dev/null 2>&1 \\
  || $pip install --upgrade {main} {options} $what 2>&1 || {{ rm -rf .{key}.new; exit 1; }}
if PYTHONPATH=.{key}.new {python} -m pip check 2>/dev/null | grep -E {conflict}; then
  rm -rf .{key}.new; exit 1
fi
mv .{key}.new {key}
"""


def is_stacks(name: str) -> bool:
    """Return whether a package is the stack's, or comes from where the stack's torch does."""
    return any(each.fullmatch(canonicalize_name(name)) for each in (PROTECTED, _COMPANIONS))


def name_packages(packages: PackageList, stack: Stack) -> str:
    """Return the name of the folder for a list of packages beside a stack."""
    names = ("lines", "is_lock", "own_torch", "constraints", "index", "indexes", "links")
    asked = {name: getattr(packages, name) for name in names}
    text = json.dumps({"stack": stack_digest(stack), **asked})
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_packages(packages: PackageList, stack: Stack, resolver: Resolver) -> None:
    """Resolve packages for the stack's Ubuntu, before there is a node.

    Raises :class:`UsageError` with uv's reason.
    """
    known = [parse_requirement(text) for text in stack.python_packages]
    pins = {one.name: one.pinned for one in known if one and one.pinned}
    # The node's last number is unknown, and only a lower bound on it is common.
    target = NodePython(f"{stack.python}.99", f"2.{RELEASES[stack.ubuntu].glibc_minor}")
    resolve(packages, stack, pins, target, resolver)


def install_packages(
    head: Host, packages: PackageList, stack: Stack, note: TextSink, environment: Mapping[str, str]
) -> str:
    """Install packages on the head, unless it has them; return their folder's name, "" for none.

    ``environment`` is the cluster's, such as a proxy.
    Raises :class:`UsageError` with uv's reason if they can't be resolved, or need another torch.
    """
    key = name_packages(packages, stack)
    look = f"cd ~/spr-packages/{key} 2>/dev/null && touch . && cat requirements.txt || true"
    said = head.run(f"{VENV}/bin/python -V; {look}").stdout
    version, _, known = said.removeprefix("Python ").partition("\n")
    _require_python(packages, version)
    if known.strip() or not packages.lines:
        return key if known.strip() else ""
    note(f"resolving {packages}")
    said = head.run(f"{VENV}/bin/python -I -c {shlex.quote(_INSTALLED)}").stdout
    version, glibc, found, pip = json.loads(said)
    installed = {str(canonicalize_name(name)): number for name, number in found.items()}
    wanted = resolve(packages, stack, installed, NodePython(version, glibc), find_resolver())
    if not wanted:
        return ""
    names = ", ".join(wanted[:6]) + (f", and {len(wanted) - 6} more" if len(wanted) > 6 else "")
    note(f"installing {counted(len(wanted), 'package')}: {names}")
    sources = _sources_for(packages, stack, wanted)
    options = [f"--extra-index-url={url}" for url in sources.indexes]
    options += [f"--find-links={url}" for url in sources.find_links]
    own = parse_pip_configuration(pip)
    searched = Sources((packages.index or own.index,)) + own.sources
    conflict = "" if packages.own_torch else PROTECTED.pattern
    hashes = {_name(line): line[line.find(" --hash") :] for line in packages.lines if " --" in line}
    lines = "".join(
        f"{pin}{'' if is_stacks(_name(pin)) else hashes.get(_name(pin), '')}\n" for pin in wanted
    )
    listed, python = f"{JobPaths('').home}/.spr-{uuid.uuid4().hex}", f"{VENV}/bin/python"
    head.put(lines.encode(), listed)
    script = _INSTALL.format(
        key=key,
        listed=listed,
        python=python,
        options=shlex.join(options),
        main=shlex.join([f"--index-url={packages.index}"] if packages.index else []),
        sources=shlex.join((*searched.options, *own.options)),
        variables=shlex.join(f"{name}={value}" for name, value in own.environment.items()),
        conflict=shlex.quote(f" requirement ({conflict})[^a-z0-9.-]" if conflict else "^$"),
    )
    command = with_environment(environment, f"bash -c {shlex.quote(script)}")
    done = head.run(command, timeout_s=_INSTALL_S, check=False)
    if done.exit_code:
        last = (done.stdout.strip() or done.stderr).rpartition("ERROR: ")[2].split()
        raise HostError(head.name, f"installing {packages} failed: {' '.join(last)[-300:]}")
    return key


def _require_python(packages: PackageList, version: str) -> None:
    try:
        pythons = SpecifierSet(packages.python)
    except InvalidSpecifier as error:
        raise UsageError(f"{packages.source}: requires-python: {error}") from None
    if not pythons.contains(version, prereleases=True):
        raise UsageError(
            f"{packages.source} needs Python {packages.python}, and the nodes have {version}",
            hint="choose a stack with that version (`spr-cluster stacks`)",
        )


def _sources_for(packages: PackageList, stack: Stack, pins: Iterable[str]) -> Sources:
    """Return the indexes besides the main one: the stack's have torch's builds for CPUs."""
    needs = packages.own_torch or any(_COMPANIONS.fullmatch(_name(pin)) for pin in pins)
    listed = Sources(packages.indexes, packages.links)
    return Sources(stack.indexes, stack.find_links) + listed if needs else listed


def resolve(
    packages: PackageList,
    stack: Stack,
    installed: Mapping[str, str],
    target: NodePython,
    resolver: Resolver,
) -> list[str]:
    """Return the pins to install beside the stack's, which are preferred.

    Raises :class:`UsageError` with uv's reason.
    """
    kept = {name: version for name, version in installed.items() if PROTECTED.fullmatch(name)}
    if packages.own_torch:
        kept = {}
    lines = _without_stack(packages, stack, kept, target.version)
    main = Sources((packages.index or resolver.configuration.index,))
    with tempfile.TemporaryDirectory() as folder:
        excluded, preferred = Path(folder, "excluded.txt"), Path(folder, "preferred.txt")
        constraints = Path(folder, "constraints.txt")
        constraints.write_text("\n".join(packages.constraints))
        excluded.write_text("".join(f"{name}\n" for name in kept))
        options = ["--excludes", str(excluded), "--output-file", str(preferred)]
        options += ["--no-deps"] if packages.is_lock else ["--constraints", str(constraints)]
        stacks = "".join(f"{name}=={version}\n" for name, version in installed.items())
        pins: dict[str, str] = {}
        sources: Sources | None = None
        while sources != (sources := main + _sources_for(packages, stack, pins.values())):
            preferred.write_text(stacks)
            found = resolver.resolve(lines, target, sources, _RESOLVE_S, *options, binary=False)
            if found.error:
                raise UsageError(f"{packages.source}: {found.error}", hint=packages.hint)
            pins = _parse(preferred.read_text())
    new = {name: pin for name, pin in pins.items() if pin != f"{name}=={installed.get(name)}"}
    return [pin for name, pin in sorted(new.items()) if not _is_kept(name, kept)]


def _without_stack(
    packages: PackageList, stack: Stack, kept: Mapping[str, str], python: str
) -> list[str]:
    """Return a list without the stack's own packages. Raises :class:`UsageError` if it needs others.

    Of a lock, only what the project asks for counts: the lock chose one of many torches.
    """
    minor = ".".join(python.split(".")[:2])
    node = {**_LINUX, "python_version": minor, "python_full_version": python}
    for wanted in map(parse_line, packages.wants if packages.is_lock else packages.lines):
        if not wanted or (wanted.marker and not wanted.marker.evaluate(dict(node))):
            continue
        there = kept.get(canonicalize_name(wanted.name))
        if there and not wanted.specifier.contains(there.partition("+")[0], prereleases=True):
            raise UsageError(
                f"{packages.source} needs {wanted.name}{wanted.specifier}, and stack {stack.name} has "
                f"{there}",
                hint="loosen it, choose a stack with that version (`spr-cluster stacks`), or obey it "
                "with --own-torch, without the stack's oneCCL, IPEX, and tested match with mpirun",
            )
    if not packages.is_lock:
        return list(packages.lines)
    names = [(line, parse_line(line)) for line in packages.lines]
    return [line for line, one in names if not one or not _is_kept(one.name, kept)]


def parse_line(line: str) -> Requirement | None:
    """Return a requirement, without hashes; ``None`` if it is none, which uv reports."""
    try:
        return Requirement(line.partition(" --hash")[0])
    except InvalidRequirement:
        return None


def _is_kept(name: str, kept: Mapping[str, str]) -> bool:
    """Return whether the stack has a package, or only torch for GPUs needs it."""
    own = canonicalize_name(name)
    return own in kept or bool(kept and _GPU.fullmatch(own))


def _name(line: str) -> str:
    one = parse_line(line)
    return canonicalize_name(one.name) if one else ""


def _parse(text: str) -> dict[str, str]:
    """Return the pins in ``uv pip compile``'s output without comments, by name."""
    pins = [line.partition(";")[0].strip() for line in text.splitlines()]
    return {canonicalize_name(Requirement(pin).name): pin for pin in pins if pin}
