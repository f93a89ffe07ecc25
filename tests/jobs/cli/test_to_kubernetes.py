"""`render k8s`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import yaml

from tests.harness.command_line import CommandResult
from tests.jobs.cli.test_main import run

K8s = Callable[..., CommandResult]


@pytest.fixture
def render(capsys: pytest.CaptureFixture[str]) -> K8s:
    return partial(run, capsys, "render", "k8s")


RENDER = ("squad", "--nodes", "2", "--name", "bert")


def test_without_a_folder_it_prints_what_kubectl_takes(render: K8s) -> None:
    result = render(*RENDER)

    assert (result.code, result.err) == (0, "")
    claim, job = yaml.safe_load_all(result.out)
    assert (claim["kind"], job["kind"]) == ("PersistentVolumeClaim", "TrainJob")
    assert job["metadata"]["name"] == "bert"


def test_json_has_the_same_manifests_and_their_numbers(render: K8s) -> None:
    shown = [*yaml.safe_load_all(render(*RENDER, "--stack", "intel").out)]
    found = json.loads(render(*RENDER, "--stack", "intel", "--json").out)

    assert found["manifests"] == shown
    numbers = found["nproc_per_node"], found["omp_threads"], found["ccl_workers"], found["cpus"]
    assert numbers == (1, 30, 1, 62)
    assert found["dockerfile"].startswith("# The image of stack intel")


def test_with_a_folder_it_writes_all_that_the_image_needs(render: K8s, tmp_path: Path) -> None:
    folder = tmp_path / "it's here"
    result = render(*RENDER, "--image", "me/spr:1", "--output", str(folder))

    assert (result.code, result.err) == (0, "")
    assert f"docker build --tag me/spr:1 '{tmp_path}/it'\"'\"'s here'" in result.out
    names = {path.name for path in folder.iterdir()}
    assert names == {"Dockerfile", "requirements.txt", "code", "claim.yaml", "job.yaml"}
    assert (folder / "code/worker/tasks/__main__.py").is_file()
    assert (folder / "code/worker/tasks/squad/sample.json").is_file()
    # Once more, with other options: nothing of the first time is left.
    (folder / "code/worker/old.py").touch()
    assert render(*RENDER, "--claim", "data", "--output", str(folder)).code == 0
    assert {path.name for path in folder.iterdir()} == names - {"claim.yaml"}
    assert not (folder / "code/worker/old.py").exists()


def test_the_users_home_may_be_named_by_its_sign(
    render: K8s, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    result = render(*RENDER, "--output", "~/build")

    assert f"kubectl create -f {tmp_path}/build/" in result.out


def test_a_folder_with_other_files_stays_as_it_is(render: K8s, tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "mine.py").touch()
    result = render(*RENDER, "--output", str(tmp_path))

    assert result.code == 2
    assert result.err.startswith(f"spr-cluster: --output {tmp_path}: it contains other files")
    assert [path.name for path in tmp_path.rglob("*")] == ["code", "mine.py"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("squad", "the following arguments are required: --nodes"),
        (
            "squad --nodes 0",
            "argument --nodes: '0': expected a whole number of at least 1",
        ),
        ("squad --nodes 2 --kind Job", "argument --kind: invalid choice: 'Job'"),
        ("squad --nodes 2 --data x.json", "--data x.json: no pod has this path"),
        ("squad --nodes 2 --image=", "--image is empty"),
        ("squad --nodes 2 --clam x", "unknown option '--clam'; did you mean --claim?"),
        ("sqad", "argument JOB: invalid choice: 'sqad'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(render: K8s, words: str, message: str) -> None:
    result = render(*words.split())

    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"spr-cluster: {message}")


def test_the_help_has_examples_that_work(
    render: K8s, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    help_ = render("squad", "--help").out
    lines = [line.partition("  the ")[0] for line in help_.splitlines()]
    examples = [line.split("|")[0].split() for line in lines if line.startswith("  spr-cluster ")]

    assert len(examples) == 5
    for words in examples:
        assert render(*words[3:]).code == 0, words
