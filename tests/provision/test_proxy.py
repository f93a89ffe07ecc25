"""``--proxy``: the installation goes through a real proxy; S3, metadata, and other nodes stay direct."""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Iterator

import pytest
import requests.utils
from botocore.httpsession import ProxyConfiguration
from botocore.utils import get_environ_proxies

from infra.wait import Silent
from provision.install import VENV, install_stack, proxy_environment
from provision.stacks.load import load_stack
from provision.stacks.stack import Stack
from tests.provision.machine import Machine, ShellHost
from tests.provision.package_index import PackageIndex, serve_index
from tests.provision.test_locked_install import HERE, replace_python

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


@pytest.mark.parametrize("is_pips", [False, True])
def test_apt_and_pip_use_it_for_a_host_that_only_the_proxy_knows(
    machine: Machine, index: PackageIndex, *, is_pips: bool
) -> None:
    """``is_pips``: only the machine's configuration of pip names it."""
    for name in ("dpkg", "dpkg-query", "compgen", "systemctl"):
        machine.replace(name)
    machine.replace("apt-get", f"env > {machine.folder}/environment-of-apt")
    replace_python(machine)
    machine.path("/var/log").mkdir(parents=True)
    own = {"python": HERE, "indexes": ["http://index.test"], "python_packages": ["model==1.0"]}
    base = {**load_stack("upstream").model_dump(), "examples": ""}
    stack = Stack.model_validate({**base, **own})
    pip = {"PIP_INDEX_URL": "http://index.test/", "PIP_TRUSTED_HOST": "index.test"}
    pip |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1"}

    environment = {"PIP_PROXY": index.url} if is_pips else proxy_environment(index.url, "us-east-1")
    install_stack(Node(machine), stack, Silent(), environment={**environment, **pip})

    found = {p.name for p in machine.path(VENV).glob("lib/python*/site-packages/*.dist-info")}
    assert {"model-1.0.dist-info", "sums-1.1.dist-info"} <= found
    # The probe of the index, and pip.
    assert {"http://index.test", "http://index.test/model/"} <= {*index.asked}
    seen = (machine.folder / "environment-of-apt").read_text().splitlines()
    assert ({f"http_proxy={index.url}", f"https_proxy={index.url}"} <= {*seen}) is not is_pips
    kept = [path for path in machine.root.rglob("*") if path.is_file() and "venv" not in path.parts]
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
    region = "cn-north-1" if ".cn/" in url else "eu-west-1"
    environment = proxy_environment(PROXY, region, ("node1", "172.31.5.7"))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    host = url.split("/")[2]

    assert bool(urllib.request.proxy_bypass(host)) is direct
    assert bool(requests.utils.get_environ_proxies(url)) is not direct
    found = ProxyConfiguration(get_environ_proxies(url)).proxy_url_for(url)
    assert found == (None if direct else PROXY)


def test_without_one_nothing_is_set() -> None:
    assert proxy_environment("", "us-east-1", ("node0",)) == {}
