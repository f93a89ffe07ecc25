"""Any program, and the published recipe's launch, on nodes with real SSH and mpirun."""

from __future__ import annotations

import json
import os
import pty
import re
import secrets
import socket
import subprocess
import time
import urllib.request
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import TWO, LiveCluster, ssh_two
from tests.harness.processes import JobProcesses

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
NAME = TWO[1]
PLAIN = ("--name", NAME, "--folder", "none")

_SCRIPT = """\
import json, os, socket, sys
import torch, torch.distributed as dist
from helper import DOUBLE
from spr_cluster import speed_up

dist.init_process_group(os.environ["SPR_BACKEND"])
number = torch.tensor([float(dist.get_rank() + 1)])
replica = speed_up(torch.nn.Linear(1, 1), bf16=False)
replica(number).backward()
dist.all_reduce(number)
told = {
    "sum": DOUBLE * number.item(),
    "gradient": replica.module.weight.grad.item(),
    "argv": sys.argv[1:],
    "host": socket.gethostname(),
    "cpus": len(os.sched_getaffinity(0)),
    "threads": torch.get_num_threads(),
    "omp": os.environ["OMP_NUM_THREADS"],
    "seed": os.environ["SEED"],
    "local": os.environ["LOCAL_RANK"] + " of " + os.environ["LOCAL_WORLD_SIZE"],
}
name = f"rank-{os.environ['RANK']}.json"
open(os.path.join(os.environ["SPR_OUTPUT"], name), "w").write(json.dumps(told))
# In one piece: print writes a line in several, between which another rank may speak.
sys.stdout.write(f"rank {dist.get_rank()} of {dist.get_world_size()}\\n")
dist.destroy_process_group()
"""

# Has the script's options known by this node's transformers, and leaves figures as it does.
_STAND_IN = """\
import json, os, sys
import torch.distributed as dist
import utils_qa

if os.environ.get("RANK", "0") == "0":
    from transformers import HfArgumentParser, TrainingArguments

    its_own = {"--model_name_or_path", "--dataset_name", "--max_seq_length", "--doc_stride"}
    known = set(HfArgumentParser(TrainingArguments)._option_string_actions) | its_own
    unknown = [word for word in sys.argv[1:] if word.startswith("--") and word not in known]
    assert not unknown, unknown
output = sys.argv[sys.argv.index("--output_dir") + 1]
assert not os.path.exists(output) or os.environ.get("RANK", "0") != "0", output
dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
if os.environ.get("RANK", "0") == "0":
    os.makedirs(output)
    figures = {"train_runtime": 2.0, "train_samples": 8, "train_samples_per_second": 4.0}
    figures |= {"eval_f1": 50.0, "eval_exact_match": 25.0, "world": int(os.environ["WORLD_SIZE"])}
    open(os.path.join(output, "all_results.json"), "w").write(json.dumps(figures))
"""


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_a_script_of_torch_runs_on_all_nodes(
    two: LiveCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my script.py").write_text(_SCRIPT)
    (tmp_path / "helper.py").write_text("DOUBLE = 2\n")
    more = ("--files=helper.py", "--env=SEED=a b", "--results=out")

    done = two.cli.run("run", "--name", NAME, *more, "--", "python", "my script.py", "--lr", "1e-4")

    first, second = read(tmp_path / "out/rank-0.json"), read(tmp_path / "out/node1/rank-1.json")
    assert first["sum"] == second["sum"] == 6
    assert first["gradient"] == second["gradient"] == 1.5
    assert first["argv"] == ["--lr", "1e-4"]
    assert {first["host"], second["host"]} == {
        "ip-" + node["private_ip"].replace(".", "-") for node in two.up_result["nodes"]
    }
    for result in (first, second):
        assert result["cpus"] == result["threads"] == int(result["omp"])
        assert (result["seed"], result["local"]) == ("a b", "0 of 1")
    assert "rank 1 of 2" in done.stderr
    assert "sending 2 files" in done.stderr
    assert "2 ranks on 2 nodes" in done.stdout
    kept = read(tmp_path / "out/job/job.json")
    assert (kept["exit_code"], kept["cloud"], kept["billed"]) == (0, "local", False)
    assert (tmp_path / "out/job/log").is_file()


def test_a_program_on_the_users_terminal(two: LiveCluster, tmp_path: Path) -> None:
    program = "read -p 'your name: ' name; [ -t 1 ] && echo hello $name, $RANK of $WORLD_SIZE"
    argv = [*two.cli.argv, "run", *PLAIN, "--pty", f"--results={tmp_path}/out", "--", "sh", "-c"]
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [*argv, f"{program}; echo $name > $SPR_OUTPUT/name; exit 3"],
        env=two.cli.environment,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    ) as running:
        os.close(theirs)
        shown = b""
        with suppress(OSError):  # the end of the terminal
            while block := os.read(ours, 1 << 16):
                if b"your name" not in shown and b"your name" in shown + block:
                    os.write(ours, b"Ada\n")
                shown += block
        assert running.wait(60) == 1, shown.decode()
    assert b"hello Ada, 0 of 1" in shown
    assert b"sh ended with exit code 3" in shown
    assert (tmp_path / "out/name").read_text() == "Ada\n"


# In one piece, like the script above.
_SHOW = "import sys\nsys.stdout.write('first version ' + open('../data/x').read() + '\\n')\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a job that prints what it is, and the working folder in it."""
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    root = tmp_path / "my project"
    (root / "src").mkdir(parents=True)
    monkeypatch.chdir(root)
    subprocess.run(["git", "init", "--quiet"], check=True)
    (root / "src/show.py").write_text(_SHOW)
    (root / ".gitignore").write_text("data/\nbig.bin\n")
    (root / "big.bin").write_bytes(b"0" * 1000)
    (root / "data").mkdir()
    (root / "data/x").write_text("of the data")
    (root / "spr-cluster.toml").write_text(
        f'[cluster]\nname = "{NAME}"\n[jobs.show]\ncommand = "sh -c \'cd src && python show.py\'"\n'
        'data-dir = "data"\n'
    )
    return root


def test_a_queued_job_runs_the_project_as_it_was_submitted(
    two: LiveCluster, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two.cli.run("run", *PLAIN, "--detach", "--", "sleep", "6")
    queued = two.cli.run("run", "show", "--detach")
    assert "sending my project: 3 files" in queued.stderr
    job = re.search(r"run-\d{8}-\d{6}-\w{3}", queued.stdout)
    assert job
    (project / "src/show.py").write_text(_SHOW.replace("first", "other"))
    monkeypatch.chdir(project / "src")

    other = two.cli.run("run", "show")

    assert "sent 1 changed file" in other.stderr  # the data is there already
    assert "sent 0 changed files" in other.stderr
    assert other.stderr.count("other version of the data\n") == 2
    log = two.cli.run("logs", job[0]).stdout
    assert log.count("first version of the data\n") == 2
    for node in ("node0", "node1"):
        found = ssh_two(two, node, f"cd spr-jobs/{job[0]}/work; ls -A; ls ~/spr-folders | wc -l")
        assert found.split() == [".gitignore", "data", "spr-cluster.toml", "src", "2"]


def count_readable(two: LiveCluster, secret: str) -> dict[str, str]:
    """Count the secret in what others can see on each node: process lists, their own environments, the queue,
    and files of any mode but 0600.
    """
    pattern = f"[{secret[3]}]{secret[4:]}"  # which does not match itself
    look = f"""sudo bash -c 'cd /proc; cat [0-9]*/cmdline; for p in [0-9]*; do
      [ "$(stat -c %U $p)" = ubuntu ] || cat $p/environ; done; scontrol -o show job; scontrol -d show job
      find /home /var/log /var/spool /var/lib/slurm* /tmp -xdev -type f ! -perm 600 -exec cat {{}} +
      ' 2>/dev/null | tr '\\0' '\\n' | grep -c '{pattern}' || true"""
    return {node: ssh_two(two, node, look).strip() for node in ("node0", "node1")}


def find_left(two: LiveCluster, secret: str) -> list[str]:
    """Return each node's files that contain the secret."""
    pattern = f"[{secret[3]}]{secret[4:]}"
    left = f"sudo grep -rl '{pattern}' /home /var/log /var/spool /tmp 2>/dev/null || true"
    return [ssh_two(two, node, left) for node in ("node0", "node1")]


def test_a_secret_is_only_in_the_ranks_which_cancel_now_ends(
    two: LiveCluster, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = f"hf_{secrets.token_hex(12)}"
    monkeypatch.setenv("HF_TOKEN", secret)
    (project / ".env").write_text(f"# mine\nexport OTHER='{secret} x'\n")
    check = '[ $HF_TOKEN = hf_$REST ] && [ "$OTHER" = "$HF_TOKEN x" ] && echo it fits; sleep 601'
    given = ("--env=HF_TOKEN", "--env=@.env", f"--env=REST={secret[3:]}", "--results=out")
    with two.cli.start("run", *PLAIN, *given, "--", "sh", "-c", check) as running:
        assert running.stdout is not None
        begun: list[str] = []
        while sum("it fits" in line for line in begun) < 2:
            begun.append(next(running.stdout))
        own = "cat $(ls -td ~/spr-jobs/run-*/ | head -1)environment.json"
        assert secret in ssh_two(two, "node1", own)
        found = count_readable(two, secret)
        processes = JobProcesses.find(partial(ssh_two, two), two.names)
        cancelled = two.cli.json("cancel", "--name", NAME, "--now")
        processes.require_gone()
        for node in two.names:
            assert ssh_two(two, node, "pgrep -fx 'sleep 601' || true") == ""
        shown = "".join([*begun, *running.stdout])
        assert running.wait(timeout=60) == 1, shown
    assert cancelled["state"] == "cancelled"
    assert found == {"node0": "0", "node1": "0"}
    assert secret[3:] not in shown
    assert find_left(two, secret) == ["", ""]
    tops = (two.cli.home, project / "out")
    files = [path for top in tops for path in top.rglob("*") if path.is_file()]
    assert len(files) > 5
    assert not [path for path in files if secret[3:].encode() in path.read_bytes()]
    assert "HF_TOKEN" in (project / "out/job/job.json").read_text()


def test_projects_with_other_packages_run_side_by_side(two: LiveCluster, project: Path) -> None:
    (project / "src/show.py").write_text(
        "import importlib.util\nfrom importlib.metadata import version\nimport iniconfig\n"
        "print(importlib.util.find_spec('torch').origin)\nprint('has', version('iniconfig'))\n"
    )
    (project / "requirements.txt").write_text("iniconfig==2.0.0\ntorch>=2\n")
    first = two.cli.run("run", "show")
    assert "installing 1 package: iniconfig==2.0.0" in first.stderr
    assert first.stderr.count("has 2.0.0\n") == 2
    assert "/opt/spr-cluster/venv/" in first.stderr, "torch is the stack's"

    # A project that is run as if it were installed.
    (project / "pyproject.toml").write_text(
        '[project]\nname = "my-lib"\nversion = "1.5"\ndependencies = ["iniconfig==1.1.1"]\n'
        '[project.scripts]\ngo = "mine:main"\n'
        '[project.optional-dependencies]\ntrain = ["accelerate"]\n'
    )
    (project / "src/mine.py").write_text(
        "import os\nfrom importlib.metadata import version\nfrom pathlib import Path\n"
        "from accelerate import PartialState\ndef main():\n"
        "    state = PartialState(cpu=bool(os.environ['ACCELERATE_USE_CPU']))\n"
        "    Path('runs').mkdir(exist_ok=True)\n"
        "    found = [version(each) for each in ('my-lib', 'iniconfig')]\n"
        "    Path('runs', f'{state.process_index}.txt').write_text(' '.join(found))\n"
        "    print('of', state.num_processes, state.distributed_type.value)\n"
    )
    (project / "spr-cluster.toml").write_text(
        f'[cluster]\nname = "{NAME}"\n[jobs.go]\ncommand = "go"\noutput-dir = "runs"\n'
        'packages = "pyproject.toml[train]"\n'
    )
    done = two.cli.run("run", "go", "--results=fetched")

    assert done.stderr.count("of 2 MULTI_CPU\n") == 2
    for path in ("fetched/0.txt", "fetched/node1/1.txt"):
        assert (project / path).read_text() == "1.5 1.1.1"


def test_files_ports_and_plain_ssh(
    two: LiveCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    (tmp_path / "sent/deep").mkdir(parents=True)
    content = secrets.token_bytes(3 << 20)
    (tmp_path / "sent/deep/a b.bin").write_bytes(content)
    name = ("--name", NAME)
    two.cli.run("cp", *name, "-r", "sent", "node1:")
    half = "cd sent/deep && truncate -s 1M 'a b.bin'"  # as after a lost connection
    ssh_two(two, "node1", half)
    two.cli.run("cp", *name, "-r", "sent", "1:")
    two.cli.run("cp", *name, "-r", "node1:sent/", "back")
    assert (tmp_path / "back/deep/a b.bin").read_bytes() == content

    two.cli.run("ssh", "--setup")
    config = str(tmp_path / "user/.ssh/config")
    plain = ["-F", config, f"{NAME}-node1"]
    hostname = subprocess.run(
        ["ssh", *plain, "hostname"], capture_output=True, text=True, timeout=60
    )
    assert hostname.stdout.strip() == two.hostnames[1], hostname.stderr
    for argv in (
        ["scp", "-F", config, f"{NAME}-node1:sent/deep/a b.bin", "by-scp"],
        ["rsync", "-s", "-e", f"ssh -F {config}", f"{NAME}-node1:sent/deep/a b.bin", "by-rsync"],
    ):
        subprocess.run(argv, check=True, capture_output=True, timeout=60)
        assert (tmp_path / argv[-1]).read_bytes() == content
    two.cli.run("ssh", "--remove-setup")
    assert (tmp_path / "user/.ssh/config").read_text() == ""

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve = "cd sent/deep && (timeout 60 python3 -m http.server 8123 --bind 127.0.0.1 >/dev/null 2>&1 &)"
    ssh_two(two, "node1", serve)
    forward = ("-L", f"{port}:127.0.0.1:8123", "--no-shell", "node1")
    with two.cli.start("ssh", *name, *forward) as forwarding:
        for _ in range(100):
            with suppress(OSError):
                url = f"http://127.0.0.1:{port}/a%20b.bin"
                answer = urllib.request.urlopen(url, timeout=5).read()
                break
            time.sleep(0.1)
        forwarding.terminate()
    assert answer == content


def test_a_programs_exit_code_is_reported(two: LiveCluster, tmp_path: Path) -> None:
    run = ("run", *PLAIN, "--results")
    program = ("--nodes=1", "--", "sh", "-c", "hostname; pwd; exit 3")
    failed = two.cli.run(*run, str(tmp_path), *program, check=1)
    assert two.hostnames[0] in failed.stderr.split()
    assert two.hostnames[1] not in failed.stderr.split()
    assert "/work" in failed.stderr
    assert read(tmp_path / "job/job.json")["exit_code"] == 3
    (line,) = [row for row in failed.stderr.splitlines() if row.startswith("spr-cluster: ")]
    assert "sh ended with exit code 3" in line


def test_the_published_recipe_is_launched_with_flags_that_the_node_knows(
    two: LiveCluster, tmp_path: Path
) -> None:
    folder = tmp_path / "qa"
    folder.mkdir()
    (folder / "run_qa.py").write_text(_STAND_IN)
    (folder / "utils_qa.py").write_text("")
    reference = ("train", "squad", "--name", NAME, "--recipe=reference", "--run-qa", str(folder))

    result = two.cli.json(*reference, "--results", str(tmp_path / "both"))

    assert (result["recipe"], result["f1"], result["world_size"]) == ("reference", 50.0, 4)
    assert read(tmp_path / "both/model/all_results.json")["world"] == 4
    assert read(tmp_path / "both/results.json") == result


# The last elements wait for the test on their node. Each run of an element is a line, and the third fails.
_ELEMENT = """\
if [ $SPR_ARRAY_INDEX -gt 4 ]; then
  touch $GO-begun; until [ -e $GO ]; do sleep 0.1; done
fi
echo $SPR_ARRAY_INDEX >> $GO-ran; echo $name > $SPR_OUTPUT/own; [ $SPR_ARRAY_INDEX != 3 ]
"""


def test_an_array_ends_each_element_once_though_a_rank_dies(
    two: LiveCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "element.sh").write_text(_ELEMENT)
    (tmp_path / "runs.csv").write_text("name\n" + "".join(f"row {n}\n" for n in range(1, 9)))
    go = f"/tmp/go-{secrets.token_hex(4)}"
    more = ("--name", NAME, "--retries=1", f"--env=GO={go}", "--results=out", "--detach")
    words = ("--array=runs.csv", "--json", "--", "sh", "element.sh")
    job = json.loads(two.cli.run("run", *more, *words).stdout)["job"]

    def wait_for(name: str, value: object) -> None:
        until = time.monotonic() + 120
        while (state := two.cli.json("jobs", job, *TWO))[name] != value:
            assert time.monotonic() < until, state
            time.sleep(0.2)

    wait_for("progress", "4 of 8 done, 1 failed")
    two.cli.run("fetch", job, *TWO, "--results=early")
    early = {path.parent.name for path in (tmp_path / "early").rglob("own")}
    assert early == {"1", "2", "3", "4"}
    kill = "kill -KILL $(pgrep -f '^[^ ]*python[^ ]* -m worker.array')"
    ssh_two(two, "node1", f"until [ -e {go}-begun ]; do sleep 0.1; done; {kill}")
    # What ends on node0 before its rank is ended too would not count, and run again.
    wait_for("attempt", 2)
    for node in ("node1", "node0"):
        ssh_two(two, node, f"touch {go}")
    two.cli.run("wait", job, *TWO, check=1)

    shown = two.cli.run("jobs", *TWO).stdout
    (line,) = (line for line in shown.splitlines() if line.startswith(f"{job} "))
    assert "failed (1)" in line
    assert "8 of 8 done, 1 failed" in line
    assert f"{job}: 1 of 8 elements failed: 3" in shown
    two.cli.run("fetch", job, *TWO, "--results=out")
    results = read(tmp_path / "out/results.json")
    assert [each["element"] for each in results["elements"]] == [*range(1, 9)]
    assert results["failed"] == [3]
    found = sorted((tmp_path / "out").rglob("own"))
    assert [path.read_text() for path in found] == [f"row {n}\n" for n in range(1, 9)]
    assert {path.parent.parent.name for path in found} == {"elements"}
    logs = {path.name for path in (tmp_path / "out/job/logs").iterdir()}
    assert logs == {f"element-{n}.log" for n in range(1, 9)}
    assert '"event": "restarted", "attempt": 2' in (tmp_path / "out/job/log").read_text()
    ran = ssh_two(two, "node0", f"cat {go}-ran; ssh node1 cat {go}-ran; true").split()
    assert sorted(ran) == [str(n) for n in range(1, 9)]
