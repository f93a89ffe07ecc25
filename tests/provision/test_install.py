"""The installation script, run for real with every outside command replaced."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from infra.errors import HostError, UsageError
from infra.progress import Silent
from provision.host import Result
from provision.install import install_stack, render_install_script, wait_for_cloud_init
from provision.stacks import Stack, load_stack, stack_names
from tests.fakes import FakeHost


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A folder of commands that only write down how they were called."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sudo", "dpkg-query", "compgen", "pip"):
        (folder / name).write_text(f'#!/bin/bash\necho {name} "$@" >> {tmp_path}/calls\n')
    (folder / "python3").write_text(
        "#!/bin/bash\n"
        f'echo python3 "${{@: -1}}" >> {tmp_path}/calls\n'
        '[[ "${@: -1}" == *unreachable* ]] && exit 1\nexit 0\n'
    )
    for path in folder.iterdir():
        path.chmod(0o755)
    venv = tmp_path / "venv" / "bin"
    venv.mkdir(parents=True)
    (venv / "pip").symlink_to(folder / "pip")
    (venv / "python").symlink_to(folder / "python3")
    return tmp_path


def run_script(machine: Path, stack: Stack) -> list[str]:
    script = render_install_script(stack).replace(
        "venv=/opt/spr-cluster/venv", f"venv={machine}/venv"
    )
    # bash's own compgen looks for tcmalloc below /usr/lib, which a test machine need not have.
    script = "enable -n compgen\n" + script
    path = f"{machine / 'bin'}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash"], input=script, env={"PATH": path}, text=True, capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return (machine / "calls").read_text().splitlines()


def make_stack(**changes: object) -> Stack:
    return Stack.model_validate({**load_stack("upstream").model_dump(), **changes})


def test_an_index_that_cannot_be_reached_is_left_out(machine: Path) -> None:
    stack = make_stack(indexes=["https://good.test/", "https://unreachable.test/"])

    (pip,) = [call for call in run_script(machine, stack) if call.startswith("pip install")]

    assert "--extra-index-url https://good.test/ " in pip
    assert "unreachable" not in pip
    assert "torch==2.13.0" in pip
    assert "impi-rt==2021.18.1" in pip


def test_missing_system_packages_are_installed_waiting_for_the_lock(machine: Path) -> None:
    apt = [call for call in run_script(machine, make_stack()) if "apt-get" in call]

    assert len(apt) == 2
    assert all("DPkg::Lock::Timeout=900" in call for call in apt)
    assert apt[1].endswith("--no-install-recommends python3-venv google-perftools numactl")


def test_a_package_name_cannot_run_a_command(machine: Path) -> None:
    evil = make_stack(python_packages=["torch; touch /tmp/owned", "$(id)"])

    (pip,) = [call for call in run_script(machine, evil) if call.startswith("pip install")]

    assert pip.endswith("torch; touch /tmp/owned $(id)")


def test_a_failed_installation_ends_with_its_last_lines() -> None:
    class Failing(FakeHost):
        def run(self, command: str, **options: object) -> Result:
            on_line = options["on_line"]
            assert callable(on_line)
            for line in ("@step Python packages", "ERROR: No matching distribution for torch"):
                on_line(line)
            return Result(1, "", "")

    with pytest.raises(
        HostError, match=r"\[node0\] installing stack intel failed: ERROR: No matching"
    ):
        install_stack(Failing("node0", []), load_stack("intel"), Silent())


@pytest.mark.parametrize(("code", "fine"), [(0, True), (2, True), (1, False)])
def test_cloud_init_may_end_with_warnings_but_not_with_an_error(code: int, fine: bool) -> None:
    class Booted(FakeHost):
        def run(self, command: str, **_: object) -> Result:
            return Result(code, "status: error", "")

    if fine:
        wait_for_cloud_init(Booted("node0", []))
    else:
        with pytest.raises(HostError, match="cloud-init failed: status: error"):
            wait_for_cloud_init(Booted("node0", []))


def test_the_stacks_that_ship() -> None:
    assert stack_names() == ("intel", "upstream")
    intel, upstream = load_stack("intel"), load_stack("upstream")
    assert (intel.backend, upstream.backend) == ("ccl", "gloo")
    pinned = [p for p in intel.python_packages if p.startswith(("torch", "intel", "oneccl"))]
    assert {p.split("==")[1] for p in pinned} == {"2.7.0"}
    with pytest.raises(UsageError, match="unknown stack 'x': one of intel, upstream"):
        load_stack("x")


@pytest.mark.parametrize("name", stack_names())
def test_a_stacks_versions_are_those_that_it_installs(name: str) -> None:
    stack = load_stack(name)
    pins = dict(p.split("==") for p in stack.python_packages if "==" in p)
    distributions = {"oneccl_bindings_for_pytorch": "oneccl-bind-pt"}
    for module, version in stack.versions.items():
        assert pins[distributions.get(module, module).replace("_", "-")] == version
