"""``--dry-run`` of `train` and `run`: placement and mpirun without a cluster, or from its tags."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from provision.install import VENV
from tests.harness.command_line import CommandLine
from tests.jobs.cli.test_main import run

METAL = ("--dry-run", "--instance-type", "r7iz.metal-16xl")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def dry(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    command, _, rest = " ".join(words).partition(" -- ")
    program = ("--", rest) if rest else ()
    result = run(capsys, *command.split(), "--json", *program)
    assert result.code == 0, result.err
    found: dict[str, Any] = json.loads(result.out)
    return found


def rank_variables(mpirun: str) -> dict[str, str]:
    words = shlex.split(mpirun)
    at = [number for number, word in enumerate(words) if word in ("-genv", "-env")]
    return {words[number + 1]: words[number + 2] for number in at}


def test_a_type_is_enough_for_a_task(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = dry(capsys, "train", "digits", "--demo", "--nodes", "2", *METAL)

    assert (found["nodes"], found["instance_types"]) == (2, ["r7iz.metal-16xl"])
    assert (found["nproc_per_node"], found["omp_threads"], found["backend"]) == (1, 32, "gloo")
    assert " -ppn 1 -wdir /home/ubuntu/spr-jobs/digits-" in found["mpirun"]
    assert f" {VENV}/bin/python -m worker.tasks digits " in found["mpirun"]
    variables = rank_variables(found["mpirun"])
    assert variables["I_MPI_PIN_DOMAIN"] == "[0xffffffff]"
    assert "LD_PRELOAD" not in variables, "an empty value is not exported"
    published = dry(capsys, "train squad --recipe reference --nodes 4", *METAL)
    assert published["stack"] == "reference"
    assert " -n 8 " in published["mpirun"]
    assert "/run_qa.py " in published["mpirun"]
    assert [*tmp_path.iterdir()] == []


def test_the_text_has_the_placement_and_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "train", "squad", "--demo", *METAL, "--nodes", "2", "--stack", "intel").out
    lines = text.splitlines()

    assert lines[0] == (
        "2 nodes (r7iz.metal-16xl), each with 1 rank of 31 threads + 1 for oneCCL; backend ccl, "
        "stack intel"
    )
    assert lines[1] == "about $13.20 an hour on demand (table of July 2026, us-east-1)"
    assert lines[2].startswith(f"$ {VENV}/bin/mpirun -bootstrap slurm -ppn 1 ")
    assert rank_variables(lines[2])["CCL_WORKER_COUNT"] == "1"
    assert lines[3].startswith("Nothing was sent.")


def test_each_rank_of_a_program_gets_a_socket(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "hello.py").touch()
    words = ("--dry-run", "--instance-type", "m7i.metal-48xl", "--env", "TOKEN=x", "-- hello.py")
    found = dry(capsys, "run", *words)

    assert (found["nodes"], found["nproc_per_node"], found["omp_threads"]) == (1, 2, 48)
    masks = rank_variables(found["mpirun"])["I_MPI_PIN_DOMAIN"]
    assert masks == f"[{hex(2**48 - 1)},{hex((2**48 - 1) << 48)}]"
    assert found["mpirun"].endswith(" -- hello.py")
    assert "TOKEN" not in found["mpirun"]


def test_a_cluster_is_read_from_its_tags_alone(line: CommandLine) -> None:
    line.begin("--nodes", "2")
    addresses = line.must("status", "--json").out
    head = json.loads(addresses)["nodes"][0]["private_ip"]
    line.stage(".*", "", AssertionError("a command was run on a node"))
    before, files = line.changes, [*Path().rglob("*")]
    for words in (("train", "squad", "--demo"), ("run",)):
        program = ("--", "hostname") if words == ("run",) else ()
        found = json.loads(line.must(*words, "--dry-run", "--json", *program).out)
        assert (found["nodes"], found["nproc_per_node"]) == (2, 1)
        assert rank_variables(found["mpirun"])["MASTER_ADDR"] == head
    refused = line.run("train", "squad", "--demo", "--dry-run", "--nodes", "3")

    assert (refused.code, "--nodes 3: cluster spr has 2 nodes" in refused.err) == (2, True)
    assert line.changes == before
    assert [*Path().rglob("*")] == files


def test_the_project_file_names_a_cluster_only_for_clusters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("spr-cluster.toml").write_text('[cluster]\nname = "bert"\ncloud = "aws"\n')
    place = ("--to", "slurm-script", "--nodes", "2", "--shape", "cores=8", "--dry-run")
    words = ("train", "squad", "--demo", *place)

    assert run(capsys, *words).code == 0
    refused = run(capsys, *words, "--name", "mine")
    assert "--name: not with --to slurm-script, only with --to cluster" in refused.err
