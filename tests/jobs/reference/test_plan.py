"""The published recipe: its commands by stack, its files on the nodes, its results."""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from infra.errors import JobError, UsageError
from jobs.cli.shared.job_display import render_result
from jobs.cli.train import build_reference, build_request, follow_stack
from jobs.places.plan import JobPaths, new_job_id
from jobs.reference.plan import (
    _FOR_A_MINUTE,
    PRESETS,
    ReferenceRequest,
    check_script,
    plan_reference,
    reference_argv,
    train_reference,
)
from jobs.train.request import TrainRequest
from jobs.worker.spec import JobSpec, PlacementOptions, Resources
from provision.stacks.load import load_stack, stack_names
from tests.fakes import FakeHost
from tests.golden import check_golden
from tests.jobs.context import job_context, make_hosts, mpirun_line, parse_request

NOW = datetime(2026, 7, 31, 14, 25, 1, tzinfo=timezone.utc)
PATHS = JobPaths(new_job_id("squad", NOW))
GOLDEN = Path(__file__).with_name("golden")
DISTILBERT, BERT = PRESETS["distilbert"], PRESETS["bert-large"]


@pytest.mark.parametrize("preset", list(PRESETS))
def test_the_command_of_every_stack(preset: str) -> None:
    lines = []
    for stack in map(load_stack, ("reference", "intel", "upstream")):
        for nodes in (1, 2):
            argv = reference_argv(stack, PRESETS[preset], nodes, "OUTPUT")
            lines.append(f"{stack.pin('transformers')} on {nodes}: {' '.join(argv)}")
    check_golden(GOLDEN / f"reference_{preset}.txt", "\n".join(lines) + "\n")


def test_a_stack_without_the_script_names_the_alternatives(tmp_path: Path) -> None:
    request = ReferenceRequest(DISTILBERT, tmp_path)
    bare = load_stack("upstream").model_copy(update={"examples": ""})
    with pytest.raises(UsageError, match=r"stack upstream has no run_qa\.py") as caught:
        plan_reference(request, bare, 2)
    assert "--run-qa FOLDER with the script of tag v5.23.0" in str(caught.value.hint)
    assert "refs/tags/v5.23.0.tar.gz" in str(caught.value.hint)
    for name in stack_names():
        planned = plan_reference(request, load_stack(name), 2)
        assert planned.command[1] == "/opt/spr-cluster/examples/run_qa.py"


def test_a_smoke_run_is_a_minute_on_one_node(tmp_path: Path) -> None:
    request = ReferenceRequest(DISTILBERT, tmp_path, smoke=True)
    planned = plan_reference(request, load_stack("reference"), 4)

    assert planned.command[:2] == ("sh", "-c")
    assert planned.command[3:5] == ("60", "env")
    assert (planned.spec.resources.nodes, planned.backend) == (1, "gloo")
    # Its stack's OMP_NUM_THREADS=24 is for two processes on a node.
    assert planned.spec.resources.placement == PlacementOptions("auto", 1)


@pytest.mark.parametrize(
    ("program", "code", "said"),
    [("sleep 9", 0, "@smoke over\n"), ("true", 0, ""), ("exit 7", 7, "")],
)
def test_the_smoke_timeout_is_not_a_failure(program: str, code: int, said: str) -> None:
    argv = ["sh", "-c", _FOR_A_MINUTE, "0.2", "sh", "-c", program]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (code, said)


ALL_RESULTS = {
    "epoch": 1.0,
    "eval_exact_match": 76.5,
    "eval_f1": 85.1,
    "eval_runtime": 30.0,
    "eval_samples": 10784,
    "train_runtime": 450.5,
    "train_samples": 88524,
    "train_samples_per_second": 196.5,
}


def script_hosts(files: dict[str, Any]) -> dict[str, FakeHost]:
    """Nodes on which a stand-in of the script has left these files."""
    hosts = make_hosts(["***** Running training *****"])
    hosts["node0"].answers[:0] = [("# collecting", "at 5\n")]
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            text = json.dumps(content).encode()
            info = tarfile.TarInfo(f"output/model/{name}")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text))
    hosts["node0"].files["results.tar"] = buffer.getvalue()
    return hosts


def go(hosts: dict[str, FakeHost], request: ReferenceRequest, stack: str = "upstream") -> Any:
    return train_reference(job_context(hosts, stack=stack), request)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    folder = tmp_path / "qa"
    folder.mkdir()
    for name in ("run_qa.py", "utils_qa.py", "requirements.txt"):
        (folder / name).write_text("")
    return folder


def test_results_are_converted_to_our_format(tmp_path: Path, script: Path) -> None:
    state = {"log_history": [{"step": 10, "loss": 2.5}, {"step": 20, "eval_f1": 1}]}
    hosts = script_hosts({"all_results.json": ALL_RESULTS, "trainer_state.json": state})

    result = go(hosts, ReferenceRequest(DISTILBERT, tmp_path / "out", script=script))

    written = json.loads((tmp_path / "out" / "results.json").read_text())
    assert written == json.loads(json.dumps(result))
    assert (result["recipe"], result["em"], result["f1"]) == ("reference", 76.5, 85.1)
    assert (result["samples_per_second"], result["train_samples"]) == (196.5, 88524)
    assert (result["seconds"]["train"], result["seconds"]["evaluate"]) == (450.5, 30.0)
    assert result["loss_curve"] == [(10, 2.5)]
    assert [rank["hostname"] for rank in result["ranks"]][:3] == ["node0", "node0", "node1"]
    assert (result["world_size"], result["dtype"], result["backend"]) == (6, "bf16", "gloo")
    shown = render_result(result, tmp_path)
    assert "published recipe: F1 85.1, exact match 76.5" in shown
    assert "196.5 samples/s, 450.5 s of training" in shown
    del result["seconds"]["train"]  # as with the best trial of an earlier attempt
    assert "196.5 samples/s\n" in render_result(result, tmp_path)
    line = mpirun_line(hosts["node0"])
    assert " -- python run_qa.py --model_name_or_path distilbert-base-uncased " in line
    assert f"-ppn 2 -wdir {PATHS.root} -n 6 " in line
    assert "-genv OMP_NUM_THREADS 24" in line
    upload = hosts["node0"].files[PATHS.upload]
    with tarfile.open(fileobj=io.BytesIO(upload)) as tar:
        sent = {name.rpartition("/")[2] for name in tar.getnames() if "/work/" in name}
    assert sent == {"run_qa.py", "utils_qa.py", ".keep"}


def test_results_without_an_evaluation(tmp_path: Path, script: Path) -> None:
    trained = {key: value for key, value in ALL_RESULTS.items() if key.startswith("train")}
    hosts = script_hosts({"all_results.json": trained})
    result = go(hosts, ReferenceRequest(BERT, tmp_path, JobSpec(resources=Resources(1)), script))
    assert (result["f1"], result["world_size"], result["dtype"]) == (None, 2, "fp32")
    assert "published recipe: not evaluated" in render_result(result, tmp_path)


def test_a_script_without_results_is_a_failure(tmp_path: Path, script: Path) -> None:
    with pytest.raises(
        JobError, match=r"run_qa\.py succeeded, but left no training results"
    ) as caught:
        go(script_hosts({}), ReferenceRequest(DISTILBERT, tmp_path, script=script))
    assert caught.value.hint == f"the whole log is {tmp_path}/job/log"


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("***** Running training *****\n@smoke over", "the script was training when its 60 s were"),
        ("@smoke over", "nothing failed, but the script did not start training in 60 s"),
        ("***** Running training *****", "the script finished"),
    ],
)
def test_a_smoke_run_needs_no_results(tmp_path: Path, script: Path, said: str, shown: str) -> None:
    hosts = script_hosts({})
    hosts["node0"].answers[:0] = [("# following a job", said)]
    result = go(hosts, ReferenceRequest(DISTILBERT, tmp_path, script=script, smoke=True))
    text = render_result(result, tmp_path)
    assert f"smoke run of the published recipe: {shown}" in text


def typed(*flags: str) -> Any:
    args = parse_request("train", "squad", *flags)
    return (build_reference if args.recipe == "reference" else build_request)(args, NOW)


def test_the_command_line(script: Path) -> None:
    asked = typed("--recipe=reference", "--nodes=2", "--preset=bert-large", f"--run-qa={script}")
    assert isinstance(asked, ReferenceRequest)
    assert (asked.preset, asked.script, asked.smoke) == (BERT, script, False)
    assert asked.spec.resources.nodes == 2
    assert check_script(script / "run_qa.py") == script
    fast = typed("--preset=bert-large", "--epochs=3", "--nodes=2")
    assert isinstance(fast, TrainRequest)
    assert (fast.options.model_name, fast.options.epochs) == ("bert-large-uncased", 3)
    assert (fast.options.batch_size, fast.options.learning_rate) == (12, 3e-5)
    assert fast.spec.resources.nodes == 2
    assert fast.may_tune == frozenset({"placement"})


@pytest.mark.parametrize(
    ("words", "stack", "is_reference"),
    [
        ("train squad", "reference", True),
        ("train squad --demo", "reference", False),
        ("train squad --epochs 3", "reference", False),
        ("train digits", "reference", False),
        ("train squad", "upstream", False),
    ],
)
def test_an_old_stack_runs_the_published_recipe(
    capsys: pytest.CaptureFixture[str], words: str, stack: str, is_reference: bool
) -> None:
    args = parse_request(*words.split())
    request = follow_stack(args, build_request(args, NOW), load_stack(stack), NOW)

    assert isinstance(request, ReferenceRequest) is is_reference
    line = "stack reference runs only the published recipe: this is `--recipe reference`\n"
    assert capsys.readouterr().err == (line if is_reference else "")
