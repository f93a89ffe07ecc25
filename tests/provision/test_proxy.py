"""``--proxy``: the installation goes through a real proxy; S3, metadata, and other nodes stay direct."""

from __future__ import annotations

import hashlib
import os
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pip
import pytest
import requests.utils
from botocore.httpsession import ProxyConfiguration
from botocore.utils import get_environ_proxies

from infra.wait import Silent
from provision.install import VENV, install_stack, proxy_environment
from provision.stacks.load import load_stack
from provision.stacks.lock import Pinned
from provision.stacks.stack import Stack
from tests.provision.machine import Machine, ShellHost
from tests.provision.package_index import PackageIndex, serve_index

PROXY = "http://10.0.0.9:3128"


@pytest.fixture
def index() -> Iterator[PackageIndex]:
    """An index that is also a proxy, for any host."""
    with serve_index() as index:
        index.add("model", "1.0", needs=["sums"])
        index.add("sums", "1.1")
        yield index


class Node(ShellHost):
    """A node on which bash's compgen finds tcmalloc."""

    def put(self, content: bytes, path: str, mode: int = 0o600) -> None:
        super().put(b"enable -n compgen\n" + content, path, mode)


# An environment with this environment's pip: to install another takes seconds.
_PYTHON = """
[ "$1 $2" = "-m venv" ] || exec {python} "$@"
{python} -m venv --without-pip "$3" || exit
for packages in "$3"/lib/python*/site-packages; do echo {pip} > "$packages/pip.pth"; done
printf '#!/bin/sh\\nexec %s -m pip "$@"\\n' "$3/bin/python" > "$3/bin/pip"
chmod +x "$3/bin/pip"
"""


@pytest.fixture
def node(machine: Machine) -> Machine:
    """A machine with its own Python and pip."""
    for name in ("dpkg", "dpkg-query", "compgen", "systemctl"):
        machine.replace(name)
    machine.replace("apt-get", f"env > {machine.folder}/environment-of-apt")
    machine.replace("python3", _PYTHON.format(python=sys.executable, pip=machine.folder / "pip"))
    (machine.folder / "pip").mkdir()
    (machine.folder / "pip/pip").symlink_to(Path(pip.__file__).parent)
    machine.path("/opt").mkdir()
    machine.path("/var/log").mkdir(parents=True)
    return machine


def lock_of(index: PackageIndex) -> tuple[str, ...]:
    """The lines of a lock with all that an index has."""
    wheels = {name: content for page in index.pages.values() for name, content in page.items()}
    pins = []
    for file, content in wheels.items():
        name, version, *_ = file.split("-")
        pins.append(Pinned(name, version, (hashlib.sha256(content).hexdigest(),)))
    return tuple(map(str, pins))


@pytest.mark.parametrize("is_pips", [False, True])
def test_apt_and_pip_use_it_for_a_host_that_only_the_proxy_knows(
    node: Machine, index: PackageIndex, *, is_pips: bool
) -> None:
    """``is_pips``: only the machine's configuration of pip names it. The other stack has a lock."""
    own: dict[str, Any] = {"indexes": ["http://index.test"], "python_packages": ["model==1.0"]}
    own |= {"python": f"{sys.version_info[0]}.{sys.version_info[1]}"}
    base = {**load_stack("upstream").model_dump(), "examples": ""}
    stack = Stack.model_validate({**base, **own, "lock": () if is_pips else lock_of(index)})
    if not is_pips:
        index.add("sums", "1.2")
    config = {"PIP_INDEX_URL": "http://index.test/", "PIP_TRUSTED_HOST": "index.test"}
    config |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1"}

    environment = {"PIP_PROXY": index.url} if is_pips else proxy_environment(index.url, "us-east-1")
    install_stack(Node(node), stack, Silent(), environment={**environment, **config})

    found = {p.name for p in node.path(VENV).glob("lib/python*/site-packages/*.dist-info")}
    assert {"model-1.0.dist-info", "sums-1.1.dist-info"} <= found
    # The probe of the index, and pip.
    assert {"http://index.test", "http://index.test/model/"} <= {*index.asked}
    seen = (node.folder / "environment-of-apt").read_text().splitlines()
    assert ({f"http_proxy={index.url}", f"https_proxy={index.url}"} <= {*seen}) is not is_pips
    kept = [path for path in node.root.rglob("*") if path.is_file() and "venv" not in path.parts]
    assert not [path for path in kept if index.url.encode() in path.read_bytes()], "for the image"


@pytest.mark.parametrize(
    ("url", "direct"),
    [
        ("http://169.254.169.254/latest/meta-data/", True),
        ("https://s3.eu-west-1.amazonaws.com/bucket/key", True),
        ("https://bucket.s3.eu-west-1.amazonaws.com/key", True),
        ("https://bucket.s3.cn-north-1.amazonaws.com.cn/key", True),
        ("http://node1:5000/", True),
        ("http://172.31.5.7:5000/", True),
        ("http://localhost:29500/", True),
        ("https://pypi.org/simple/", False),
        ("https://huggingface.co/api/models", False),
        # The hub takes uploads there.
        ("https://hub.s3-accelerate.amazonaws.com/key", False),
    ],
)
def test_what_is_near_stays_direct_for_every_library(
    url: str, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if "proxy" in name.lower()]:
        monkeypatch.delenv(name)
    assert proxy_environment("", "us-east-1", ("node0",)) == {}
    region = "cn-north-1" if ".cn/" in url else "eu-west-1"
    environment = proxy_environment(PROXY, region, ("node1", "172.31.5.7"))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    host = url.split("/")[2]

    assert bool(urllib.request.proxy_bypass(host)) is direct
    assert bool(requests.utils.get_environ_proxies(url)) is not direct
    found = ProxyConfiguration(get_environ_proxies(url)).proxy_url_for(url)
    assert found == (None if direct else PROXY)
