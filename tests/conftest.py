from __future__ import annotations

import gc
import ipaddress
import itertools
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

# moto reads this when it is imported; its own 1,300 images cost a second per test.
os.environ["MOTO_AMIS_PATH"] = str(Path(__file__).with_name("ubuntu_amis.json"))
# torch reads this when it is imported; several processes share this machine's cores.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from cluster.console import output
from infra.local.machines.base_image import DEFAULT_BASE
from tests.harness import botocore_files, json_output
from tests.harness.contract import KNOWN_DEVIATIONS, Contract, require_announced, watching

if TYPE_CHECKING:
    from tests.infra.local.fakes import Endpoint

# Before any command imports it.
vars(output)["emit"] = json_output.checked(output.emit)
_REPOSITORY = Path(__file__).parents[1]
_numbers = itertools.count()
# The same examples on every machine; slow ones are a matter of the machine.
settings.register_profile("house", derandomize=True, deadline=None)
settings.load_profile("house")
# Most of a command's time would be that of reading EC2's model.
botocore_files.read_once()
# Python would spend an eighth of its time on searching all loaded modules for garbage.
gc.set_threshold(500_000)
# What a test writes need not outlive a power failure.
vars(os)["fsync"] = lambda _: None
# A run in the background, or under nohup, ignores these, and so would every command that it starts.
for _number, _handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--base", default=DEFAULT_BASE, help="what the nodes of e2e tests start from")


# End-to-end tests that share a cluster, in their order; the last one of each removes it. The others have
# their own process for each file.
_TOGETHER = {
    "test_interrupted.py": "three nodes",
    "test_job_queue.py": "three nodes",
    "test_lies.py": "three nodes",
    "test_lifetime.py": "three nodes",
    "test_main_job.py": "three nodes",
    "test_bench_tune.py": "two nodes",
    "test_pinning.py": "two nodes",
    "test_remedies.py": "two nodes",
    "test_run.py": "two nodes",
    "test_study.py": "two nodes",
    "test_api.py": "two nodes",
    "kubernetes": "kubernetes",
}


class ByFile(LoadScopeScheduling):
    """Gives each process whole files, whose fixtures are then made once, and first the longest waits."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        name = path.partition("tests/e2e/")[2].partition("/")[0]
        return _TOGETHER.get(name, path)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    return ByFile(config, log)


# While the first end-to-end tests make images, for minutes and mostly on one core, these use the other.
_MEANWHILE = ("test_sweeps.py", "test_resume.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the end-to-end tests first: most of their time is spent waiting."""
    order = list(_TOGETHER)

    def place(item: pytest.Item) -> tuple[int, int]:
        name = item.path.name
        if not item.get_closest_marker("e2e"):
            return (1 if name in _MEANWHILE else 3), 0
        if _TOGETHER.get(name) == "three nodes":
            return 0, order.index(name)
        return 2, order.index(name) if name in order else 0

    items.sort(key=place)


@pytest.fixture(scope="session")
def _contract() -> Iterator[Contract]:
    contract = Contract(KNOWN_DEVIATIONS)
    with watching(contract):
        yield contract


@pytest.fixture(autouse=True)
def _keeps_the_contract(_contract: Contract, request: pytest.FixtureRequest) -> Iterator[None]:
    """Every request and answer of a test is what AWS's service model says, except what it names."""
    _contract.drain()
    yield
    marks = request.node.iter_markers("breaks_contract")
    require_announced(_contract.drain(), [pattern for mark in marks for pattern in mark.args])


@pytest.fixture(autouse=True)
def _own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes this machine's clusters or AWS configuration."""
    # Most tests use no folder, and to make one takes longer than many of them.
    folder = tmp_path_factory.getbasetemp() / f"home-{next(_numbers)}"
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SPR_CLUSTER_HOME", str(folder))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(folder / "no-aws-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(folder / "no-aws-credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("BOTO_CONFIG", os.devnull)
    monkeypatch.setenv("AWS_REGION", "us-east-1")


@pytest.fixture(autouse=True)
def _leaves_nothing_here() -> Iterator[None]:
    """No test adds files to the repository's folder, such as a job's ``output``."""
    before = _list_repository()
    yield
    assert _list_repository() <= before, f"a test wrote {_list_repository() - before}"


def _list_repository() -> set[Path]:
    # Tools' caches have names with a dot.
    return {path for path in _REPOSITORY.iterdir() if not path.name.startswith(".")}


@pytest.fixture(autouse=True)
def _only_loopback(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """moto invents public addresses that belong to strangers: no unit test can dial one."""
    if request.node.get_closest_marker("e2e") or request.node.get_closest_marker("full"):
        return
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6):
            assert ipaddress.ip_address(address[0]).is_loopback, f"a test dials {address}"
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)
    look_up = socket.getaddrinfo

    def without_aws(host: Any, *more: Any, **named: Any) -> Any:
        if str(host).endswith(".amazonaws.com"):
            raise socket.gaierror(socket.EAI_NONAME, "tests ask no DNS about AWS")
        return look_up(host, *more, **named)

    monkeypatch.setattr(socket, "getaddrinfo", without_aws)


@pytest.fixture(scope="session")
def endpoint() -> Iterator[Endpoint]:
    """Where an embedded cloud of this process answers."""
    from tests.infra.local.fakes import Endpoint

    endpoint = Endpoint()
    yield endpoint
    endpoint.close()
