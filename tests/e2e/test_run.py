"""Any program, the published recipe's launch and a scaling study, on nodes with real SSH and mpirun."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import TWO, LiveCluster, ssh_two

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
NAME = TWO[1]

_SCRIPT = """\
import json, os, socket, sys
import torch, torch.distributed as dist
from helper import DOUBLE

dist.init_process_group(os.environ["SPR_BACKEND"])
number = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(number)
told = {
    "sum": DOUBLE * number.item(),
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
from transformers import HfArgumentParser, TrainingArguments
import utils_qa

its_own = {"--model_name_or_path", "--dataset_name", "--max_seq_length", "--doc_stride"}
known = set(HfArgumentParser(TrainingArguments)._option_string_actions) | its_own
unknown = [word for word in sys.argv[1:] if word.startswith("--") and word not in known]
assert not unknown, unknown
output = sys.argv[sys.argv.index("--output_dir") + 1]
assert not os.path.exists(output) or os.environ.get("RANK", "0") != "0", output
world = int(os.environ.get("WORLD_SIZE", "1"))
if world > 1:
    dist.init_process_group("gloo")
    dist.barrier()
    dist.destroy_process_group()
else:
    assert "PMI_RANK" not in os.environ and "LOCAL_RANK" not in os.environ
if os.environ.get("RANK", "0") == "0":
    os.makedirs(output)
    figures = {"train_runtime": 2.0, "train_samples": 8, "train_samples_per_second": 4.0}
    figures |= {"eval_f1": 50.0, "eval_exact_match": 25.0, "world": world}
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
    kept = read(tmp_path / "out/job.json")
    assert (kept["exit_code"], kept["cloud"], kept["billed"]) == (0, "local", False)
    assert (tmp_path / "out/log").is_file()


def test_a_program_that_is_no_python_on_the_first_node(two: LiveCluster, tmp_path: Path) -> None:
    folder = str(tmp_path / "one")
    done = two.cli.run(
        "run", "--name", NAME, "--nodes=1", "--results", folder, "--", "sh", "-c", "hostname; pwd"
    )
    names = ["ip-" + node["private_ip"].replace(".", "-") for node in two.up_result["nodes"]]
    assert names[0] in done.stderr.split()
    assert names[1] not in done.stderr.split()
    assert "/work" in done.stderr


def test_exit_code_and_missing_program_are_reported(two: LiveCluster, tmp_path: Path) -> None:
    run = ("run", "--name", NAME, "--results")
    program = ("--", "sh", "-c", "echo to no avail; exit 3")
    failed = two.cli.run(*run, str(tmp_path), *program, check=1)
    assert read(tmp_path / "job.json")["exit_code"] == 3
    (line,) = [row for row in failed.stderr.splitlines() if row.startswith("spr-cluster: ")]
    assert "sh ended with exit code 3" in line

    missing = two.cli.run(*run, str(tmp_path / "other"), "--", "no-such-program", check=1)
    (line,) = [row for row in missing.stderr.splitlines() if row.startswith("spr-cluster: ")]
    assert "no-such-program can't be run: No such file or directory" in line


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
    smoke = two.cli.run(*reference, "--smoke", "--results", str(tmp_path / "smoke"))
    assert "smoke run of the published recipe: the script finished" in smoke.stdout
    assert read(tmp_path / "smoke/model/all_results.json")["world"] == 1
    without = two.cli.run(*reference[:5], check=2)
    assert "stack upstream has no run_qa.py" in without.stderr


def test_scaling_measures_each_size_and_predicts_others(two: LiveCluster, tmp_path: Path) -> None:
    study = two.cli.json(
        *("scaling", "squad", "--name", NAME, "--demo", "--seconds=2", "--predict=4"),
        *("--results", str(tmp_path)),
    )

    assert [(row["nodes"], row["batch_size"], row["predicted"]) for row in study["rows"]] == [
        *((1, 8, False), (2, 4, False), (4, 2, True))
    ]
    assert all(row["samples_per_second"] > 0 for row in study["rows"])
    assert read(tmp_path / "scaling.json") == study
    (kept,) = ssh_two(two, "node0", "ls spr-scaling").split()
    assert json.loads(ssh_two(two, "node0", f"cat spr-scaling/{kept}")) == study
