"""The installation script, run for real with every outside command replaced."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from infra.errors import ConnectionLostError, HostError, NoAnswerError
from infra.wait import Silent, wait_until
from provision.host import Result
from provision.install import (
    EXAMPLES,
    STACK_FILE,
    VENV,
    explain_mpi_failure,
    install_stack,
    render_install_script,
    stack_digest,
    wait_for_cloud_init,
)
from provision.stacks.load import load_stack
from provision.stacks.stack import Stack
from tests.fakes import FakeClock, FakeHost
from tests.provision.machine import Machine
from tests.provision.package_index import serve_index


@pytest.fixture
def node(machine: Machine) -> Machine:
    """A machine whose package managers only write down how they were called."""
    for name in ("dpkg", "dpkg-query", "apt-get", "compgen", "pip", "systemctl"):
        machine.replace(name)
    # The environment's Python is another one: it writes down what it is asked to check.
    machine.replace("python-of-venv")
    machine.replace("python3", _PYTHON.format(bin=machine.folder / "bin"))
    for folder in ("/opt", "/home/ubuntu"):
        machine.path(folder).mkdir()
    return machine


_PYTHON = """
case "$*" in
    "-m venv "*)
        mkdir -p "$3/bin"
        ln -s {bin}/pip "$3/bin/pip"
        ln -s {bin}/python-of-venv "$3/bin/python"
        ;;
    *unreachable*) exit 1 ;;
    *version_info*) echo 3.12 ;;
esac
"""


def run_script(node: Machine, stack: Stack, digest: str = "d1") -> list[str]:
    """Run the installation; returns what it called since."""
    before = len(node.calls)
    done = start(node, stack, digest)
    assert done.returncode == 0, done.stdout + done.stderr
    return node.calls[before:]


def start(node: Machine, stack: Stack, digest: str = "d1") -> subprocess.CompletedProcess[str]:
    # bash's own compgen looks for tcmalloc below /usr/lib, which a test machine need not have.
    return node.shell("enable -n compgen\n" + render_install_script(stack), digest)


def make_stack(**changes: object) -> Stack:
    return Stack.model_validate({**load_stack("upstream").model_dump(), "examples": "", **changes})


def pip_installs(calls: list[str]) -> list[str]:
    return [call for call in calls if call.startswith("pip install")]


def test_an_unreachable_index_fails_the_installation(node: Machine) -> None:
    """Other builds of the same versions would come from PyPI, and into an image for everybody."""
    node.replace("sleep")

    done = start(node, make_stack(indexes=["https://unreachable.test/"]))

    assert done.returncode == 1
    assert "https://unreachable.test/ can't be reached" in done.stdout
    waits = [call for call in node.calls if call.startswith("sleep")]
    assert waits == ["sleep 5", "sleep 20", "sleep 0"]
    assert pip_installs(node.calls) == []
    assert not node.path(STACK_FILE).exists()


def test_an_unreachable_index_is_skipped_if_pip_is_configured(node: Machine) -> None:
    node.replace("pip", """[ "$*" != "config list" ] || echo "global.find-links='/wheels'"\n""")
    stack = make_stack(
        indexes=["https://good.test/", "https://unreachable.test/"],
        examples="https://unreachable.test/a",
        find_links=["https://links.test/"],
        pip="25.0.1",
    )

    calls = run_script(node, stack)

    upgrade, pip = pip_installs(calls)
    assert upgrade.endswith("pip==25.0.1")
    for word in ("--find-links https://links.test/ ", "--extra-index-url https://good.test/ "):
        assert word in pip
    assert "unreachable" not in pip
    assert {"torch==2.13.0", "impi-rt==2021.18.1"} <= {*pip.split()}
    assert not any(call.endswith("/opt/spr-cluster/examples.new") for call in calls)


def test_missing_system_packages_are_installed_waiting_for_the_lock(node: Machine) -> None:
    # The first `apt update` does not reach its mirror, and succeeds all the same.
    mark = node.folder / "once"
    once = f'case "$*" in *install*) [ -e {mark} ] || {{ touch {mark}; exit 100; }} ;; esac'
    node.replace("apt-get", once)
    node.replace("sleep")
    apt = [call for call in run_script(node, make_stack()) if call.startswith("apt-get")]
    node.replace("dpkg-query", "echo install ok installed")
    assert not any(c.startswith("apt-get") for c in run_script(node, make_stack(), "d2"))

    assert [call.split()[-1] == "update" for call in apt] == [True, False] * 2
    assert not any(call.startswith("dpkg --force") for call in node.calls)
    assert all("DPkg::Lock::Timeout=300" in call for call in apt)
    packages = (*make_stack().system_packages, "slurm-wlm", "munge", "curl", "rsync")
    assert apt[1].endswith(f"--no-install-recommends {' '.join(packages)}")


@pytest.mark.parametrize(("fails", "times"), [("update", [30, 0]), ("install", [3, 3])])
def test_system_packages_that_can_not_be_installed_end_it(
    node: Machine, fails: str, times: list[int]
) -> None:
    node.replace("apt-get", f'case "$*" in *{fails}*) exit 100 ;; esac')
    node.replace("sleep")
    assert start(node, make_stack()).returncode == 1
    apt = [call for call in node.calls if call.startswith("apt-get")]
    assert [sum(f" {word}" in call for call in apt) for word in ("update", "install")] == times


@pytest.mark.parametrize("connected", [False, True])
def test_slurm_waits_until_the_node_is_connected(node: Machine, connected: bool) -> None:
    """The package makes a key by itself, which an image would carry to other clusters."""
    key, conf = node.path("/etc/munge/munge.key"), node.path("/etc/slurm/slurm.conf")
    wants = node.path("/etc/systemd/system/multi-user.target.wants/slurmd.service")
    for path in (key, conf, wants):
        path.parent.mkdir(parents=True)
        path.write_text("x")
    if not connected:
        conf.unlink()

    calls = run_script(node, make_stack())

    assert ("systemctl stop munge slurmctld slurmd" in calls) is not connected
    assert {key.exists(), wants.exists()} == {connected}


def test_the_digest_is_written_last(node: Machine) -> None:
    evil = {"python_packages": ["torch==2.13.0", "b; touch /tmp/owned", "$(id)"]}
    calls = run_script(node, make_stack(**evil), "0123456789ab")

    (pip,) = pip_installs(calls)
    assert pip.endswith(f" b; touch {node.path('/tmp')}/owned $(id)"), "a name ran a command"
    assert node.path(STACK_FILE).read_text() == "0123456789ab\n"
    assert calls[-3].startswith("python-of-venv - torch=2.13.0")
    assert calls[-2].startswith("python-of-venv -c import transformers.modeling_utils")
    assert calls[-1].startswith("sync ")
    assert {path.name for path in node.path("/opt/spr-cluster").iterdir()} == {"venv", "stack"}
    # The environment is first on the path of commands and logins.
    assert "systemctl try-restart ssh" in calls
    sshd = node.path("/etc/ssh/sshd_config.d/00-spr-cluster.conf").read_text()
    setting, startups = sshd.splitlines()
    assert setting.split()[:2] == ["SetEnv", "SHLVL=1"]
    # The ranks of a job may all log in together.
    assert startups == "MaxStartups 512:30:1024"
    folder = str(node.path(f"{VENV}/bin"))
    assert setting.split()[2].startswith(f"PATH={folder}:/usr/local/sbin:")
    found = node.shell(". /etc/profile.d/spr-cluster.sh; echo $PATH")
    assert found.stdout.startswith(f"{folder}:")
    # An installed stack is a no-op.
    calls = run_script(node, make_stack(**evil), "0123456789ab")
    assert [call.split()[0] for call in calls] == ["sudo", "compgen", "python-of-venv"]


def test_another_or_broken_stack_is_installed_and_an_unfinished_environment_recreated(
    node: Machine,
) -> None:
    run_script(node, make_stack())
    # The check fails once, as it does where a package was removed by hand.
    mark = node.folder / "failed"
    node.replace("python-of-venv", f"[ -e {mark} ] || {{ touch {mark}; exit 1; }}")
    for digest in ("d1", "d2"):
        calls = run_script(node, make_stack(), digest)
        assert len(pip_installs(calls)) == 1
        # What pip can repair or change, it does where it is.
        assert not any("-m venv" in call for call in calls)

    half_made = node.path(f"{VENV}/half-made")
    for step in ("pip", "python-of-venv"):
        node.replace(step, "exit 1")
        assert start(node, make_stack(), "d3").returncode != 0
        node.replace(step)
        assert not node.path(STACK_FILE).exists()
        half_made.touch()
        calls = run_script(node, make_stack(), f"after {step}")
        assert any(call.startswith("python3 -m venv") for call in calls)
        assert not half_made.exists()
        assert len(pip_installs(calls)) == 1


@pytest.mark.parametrize("sign", ["audit", "updates"])
def test_interrupted_dpkg_work_is_finished_first(node: Machine, sign: str) -> None:
    if sign == "audit":
        node.replace("dpkg", '[ "$1" != --audit ] || echo half configured: numactl')
    if sign == "updates":
        node.path("/var/lib/dpkg/updates").mkdir(parents=True)
        # compgen is bash's own here, since sudo starts another bash.
        node.path("/var/lib/dpkg/updates/0001").touch()

    calls = [call for call in run_script(node, make_stack()) if "--audit" not in call]

    repair = "dpkg --force-confdef --force-confold --configure -a"
    assert [call for call in calls if call.startswith("dpkg --force")] == [repair]
    names = [call.split()[0] for call in calls]
    # It waits for the locks, which the python3 of this test only writes down.
    assert names.index("python3") < names.index("dpkg") < names.index("apt-get")


def test_a_second_installation_waits_for_the_first(node: Machine) -> None:
    go = node.folder / "go"
    node.replace("pip", f'[ "$1" != install ] || until [ -e {go} ]; do sleep 0.02; done')

    def wait_for(word: str, times: int) -> None:
        def probe() -> bool | None:
            return True if sum(word in call for call in node.calls) == times else None

        wait_until(word, probe, deadline_s=60, every_s=0.05)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(start, node, make_stack())
        wait_for("pip install", 1)
        second = pool.submit(start, node, make_stack())
        # Whatever it would do comes after the lock; this is the first thing before it.
        wait_for("sudo install -d", 2)
        go.touch()
        outputs = [future.result().stdout for future in (first, second)]

    assert "@step waiting for an earlier installation" in outputs[1]
    assert "@step already installed" in outputs[1]
    assert len(pip_installs(node.calls)) == 1


def test_the_script_is_read_whole_before_it_runs(node: Machine) -> None:
    """A second upload of the same file must not pull the rug from under a run of the first."""
    script = render_install_script(make_stack())
    assert script.startswith("{\n")
    assert script.endswith("\nexit\n}\n")
    cut = script[: len(script) // 2]

    assert node.shell(cut).returncode != 0
    assert node.calls == []


LOCK = ("pip==25.0.1 --hash=sha256:" + "0" * 64, "torch==2.13.0+cpu --hash=sha256:" + "1" * 64)


def test_a_locked_stack_is_installed_by_hash(node: Machine) -> None:
    kept = node.folder / "kept"
    node.replace("pip", f'[[ "$*" != *" -r "* ]] || cat "${{@: -1}}" >> {kept}')

    upgrade, install = pip_installs(run_script(node, make_stack(pip="25.0.1", lock=LOCK)))

    for call in (upgrade, install):
        assert re.search(r" --require-hashes --no-deps -r /dev/fd/\d+$", call)
    assert "torch==" not in install
    assert kept.read_text().splitlines() == [LOCK[0], *LOCK]


def test_a_lock_is_for_one_python(node: Machine) -> None:
    node.replace("python3", _PYTHON.format(bin=node.folder / "bin").replace("3.12", "3.11"))

    done = start(node, make_stack(lock=LOCK, python="3.12"))

    (install,) = pip_installs(node.calls)
    assert "@step the lock is for Python 3.12, this is 3.11: resolving without it" in done.stdout
    assert "--require-hashes" not in install
    assert "torch==2.13.0" in install


class Flaky(FakeHost):
    """A machine whose connection breaks under the installation, for the first times."""

    def __init__(self, breaks: int) -> None:
        super().__init__("node0", [("^true$", ""), ("install|cloud-init", "@step working")])
        self.breaks = breaks

    def run(self, command: str, **options: Any) -> Result:
        done = super().run(command, **options)
        if command != "true" and self.breaks:
            self.breaks -= 1
            kind = NoAnswerError if "cloud-init" in command else ConnectionLostError
            raise kind("node0", "the connection broke")
        return done


@dataclass
class Notes(Silent):
    heard: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        self.heard.append(text)


def test_an_installation_and_the_wait_for_the_first_boot_survive_broken_connections() -> None:
    host, notes = Flaky(breaks=2), Notes()

    install_stack(host, load_stack("intel"), notes, FakeClock())

    installs = [c for c in host.commands if "install" in c]
    assert len(installs) == 3
    assert host.commands.count("true") == 2  # each time it waits until the machine answers again
    assert all(stack_digest(load_stack("intel")) in c and "tee -pa" in c for c in installs)
    text = "[node0] the connection broke; trying again ({} of 3)"
    assert [n for n in notes.heard if "again" in n] == [text.format(n) for n in (2, 3)]
    wait_for_cloud_init(host := Flaky(breaks=2), FakeClock())
    assert [c for c in host.commands if c != "true"] == ["cloud-init status --wait --long"] * 3


@pytest.mark.parametrize(
    ("gone", "tries", "error"),
    [("", 3, r"\[node0\] the connection broke"), ("i-1 is gone", 1, r"\[node0\] i-1 is gone")],
)
def test_a_connection_that_keeps_breaking_is_an_error_and_a_machine_that_is_gone_another(
    monkeypatch: pytest.MonkeyPatch, gone: str, tries: int, error: str
) -> None:
    host = Flaky(breaks=9)
    monkeypatch.setattr(host, "why_gone", lambda: gone)

    with pytest.raises(HostError, match=error):
        install_stack(host, load_stack("intel"), Silent(), FakeClock())
    assert host.breaks == 9 - tries
    assert ("true" in host.commands) is (not gone)


@dataclass
class Ended(FakeHost):
    """A machine on which every command ends with a code, after some lines."""

    code: int = 0

    def run(self, command: str, **options: Any) -> Result:
        for line in ("@step Python packages", "ERROR: No matching distribution for torch"):
            options.get("on_text", str)(line)
        return Result(self.code, "......\nstatus: error\nerrors:\n\t- ('bootcmd', 1)\n", "")


def test_a_failed_installation_reports_its_last_lines_and_cloud_init_may_end_with_warnings() -> (
    None
):
    failed = Ended("node0", [], code=1)
    with pytest.raises(HostError, match=r"\[node0\] installing stack intel failed: ERROR: No m"):
        install_stack(failed, load_stack("intel"), Silent())
    with pytest.raises(
        HostError, match=r"cloud-init failed: status: error \| errors: \| - \('bootcmd', 1\)"
    ):
        wait_for_cloud_init(failed)
    for code in (0, 2):
        wait_for_cloud_init(Ended("node0", [], code=code))


def replace_reader(node: Machine, names: str) -> None:
    """Run the Python of the test for arguments such as ``*.tar.gz*``."""
    run_it = f'case "$*" in {names}) exec {sys.executable} "$@";; esac'
    node.replace("python3", run_it + _PYTHON.format(bin=node.folder / "bin"))


def test_refused_examples_do_not_end_the_installation(node: Machine) -> None:
    replace_reader(node, "*/v4.tar.gz*")
    with serve_index() as server:
        server.statuses["/v4.tar.gz"] = 403
        done = start(node, make_stack(examples=f"{server.url}/v4.tar.gz"))

    assert done.returncode == 0, done.stdout + done.stderr
    assert "/v4.tar.gz can't be read (HTTP Error 403: " in done.stdout
    assert (node.path(EXAMPLES).exists(), node.path(STACK_FILE).exists()) == (False, True)


def test_an_index_with_a_login_is_reached_over_the_proxy_of_pip_install(node: Machine) -> None:
    replace_reader(node, "*/simple*")
    index = "http://user:pass@word@index.test/simple"
    with serve_index() as server:
        proxies = f"global.proxy='http://gone.test'\\ninstall.proxy='{server.url}'\\n"
        node.replace("pip", f"""[ "$*" != "config list" ] || printf "{proxies}"\n""")
        (pip,) = pip_installs(run_script(node, make_stack(indexes=[index])))

    assert f"--extra-index-url {index} " in pip
    assert server.asked == ["http://index.test/simple"]


@pytest.mark.parametrize("whole", [True, False])
def test_examples_are_kept_beside_the_environment(node: Machine, whole: bool) -> None:
    archive = node.folder / "v4.tar.gz"
    folder = "transformers-4/examples/pytorch/question-answering"
    names = [f"{folder}/utils_qa.py", f"{folder}/deeper/run_qa.py", "transformers-4/run_qa.py"]
    with tarfile.open(archive, "w:gz") as tar:
        for name in [*names, *([f"{folder}/run_qa.py"] if whole else [])]:
            member = tarfile.TarInfo(name)
            member.size = len(name)
            tar.addfile(member, io.BytesIO(name.encode()))
    replace_reader(node, "*.tar.gz*")

    done = start(node, make_stack(examples=archive.as_uri()))

    said, kept = done.stdout + done.stderr, node.path(EXAMPLES)
    assert (done.returncode == 0) is kept.exists() is node.path(STACK_FILE).exists() is whole, said
    if whole:
        assert sorted(path.name for path in kept.iterdir()) == ["run_qa.py", "utils_qa.py"]
        assert (kept / "run_qa.py").read_text() == f"{folder}/run_qa.py"
    else:
        assert "has no examples/pytorch/question-answering/run_qa.py" in said


@pytest.mark.parametrize(
    ("found", "wanted", "said"),
    [("1.13.0+cpu", "1.13", ""), ("2.7.1", "2.7.0", "torch: expected 2.7.0, found 2.7.1")],
)
def test_a_version_is_checked_by_its_numbers(
    node: Machine, found: str, wanted: str, said: str
) -> None:
    (node.folder / "torch.py").write_text(f"__version__ = {found!r}")
    run_it = f'PYTHONPATH={node.folder} exec {sys.executable} "$1" "$2"'
    node.replace("python-of-venv", f'[ "$1" != - ] || {run_it}')

    done = start(node, make_stack(python_packages=[f"torch=={wanted}"]))

    assert bool(done.returncode) is bool(said), done.stdout + done.stderr
    assert said in done.stdout + done.stderr


# What mpirun's failures mean


_RANK = "=   RANK 1 PID 4973 RUNNING AT node1"
_KILLED = "=   KILLED BY SIGNAL: 9 (Killed)"
_NO_PROXY = "[mpiexec@a] Error: Unable to run bstrap_proxy on node2 (pid 7)"
_NOT_BOUND = "[proxy:0:1@ip-172-31-0-11] HYD_spawn (../hydra_spawn.c:132): unable to bind process"
_NO_LIBRARY = "python: error: libmpi.so.12: cannot open shared object file: No such"


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([_NO_PROXY], "mpirun can't start on node2: does the head reach it over SSH?"),
        ([_NO_LIBRARY], _NO_LIBRARY),
        (
            [_NOT_BOUND],
            "mpirun can't pin a rank on ip-172-31-0-11: have its usable CPUs changed?",
        ),
        ([_KILLED], "a rank was killed by signal 9 (Killed)"),
        ([_RANK, _KILLED], "rank 1 on node1 was killed by signal 9 (Killed)"),
        (["all is well"], None),
    ],
)
def test_the_cause_that_mpirun_names_is_reported(lines: list[str], told: str | None) -> None:
    assert explain_mpi_failure(["first", *lines]) == told
