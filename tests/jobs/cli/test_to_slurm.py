"""`train --to slurm-script`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.jobs.cli.test_main import run

SLURM = ("train", "squad", "--to", "slurm-script")
RENDER = (*SLURM, "--nodes", "2", "--shape", "cores=32", "--job-name", "bert")


def test_it_prints_the_script_that_it_writes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    words = (*RENDER, "--demo", "--shape", "cores=8")
    printed = run(capsys, *words)
    written = run(capsys, *words, "--output", "~/a b")
    found = json.loads(run(capsys, *words, "--json").out)

    assert (printed.code, printed.err, written.code, written.err) == (0, "", 0, "")
    assert printed.out == (tmp_path / "a b/job.sbatch").read_text() == found["script"]
    numbers = found["job"], found["nodes"], found["nproc_per_node"], found["omp_threads"]
    assert numbers == ("bert", 2, 1, 8)
    assert f"rsync -a '{tmp_path}/a b'/ CENTER:bert/" in written.out
    fetch = "  rsync -a CENTER:bert/output.state/metrics CENTER:bert/output.state/logs results/bert/job/\n"
    assert (
        f"  mkdir -p results/bert/job\n  rsync -a CENTER:bert/output/ results/bert/\n{fetch}"
        in written.out
    )
    names = {path.name for path in (tmp_path / "a b").iterdir()}
    assert names == {"job.sbatch", "install.sh", "requirements.txt", "code", "data"}


@pytest.mark.parametrize("results", ["output", "output.state"])
def test_another_rendering_replaces_the_first_and_keeps_the_rest(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, results: str
) -> None:
    model = tmp_path / "encoder"
    model.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (model / name).write_text("{}")
    job = tmp_path / "job"
    first = run(capsys, *RENDER, "--demo", "--model", str(model), "--output", str(job))
    assert (first.code, first.err) == (0, "")
    (job / "code/worker/old.py").touch()
    (job / "model/old.bin").touch()
    (job / results).mkdir()
    # The data is the folder's own.
    words = ["--data", str(job / "data/train.json"), "--model", str(model), "--output", str(job)]
    words += ["--token-cache", "~/c"]
    again = run(capsys, *RENDER, *words)
    assert again.code == 0
    assert again.err.startswith(f"warning: {job} has results of an earlier job")
    assert "move output/ and output.state/ away" in again.err

    script = (job / "job.sbatch").read_text()
    assert '"data": "data/train.json"' in script
    assert '"model": "model"' in script
    assert '"token_cache": "~/c"' in script
    assert script.count("HF_HUB_OFFLINE") == 1
    # The results and the model's card have the user's own names.
    assert f"export SPR_BASE_MODEL={model}\n" in script
    assert f'"data/train.json": "{job}/data/train.json"' in script
    assert not (job / "code/worker/old.py").exists()
    assert {path.name for path in (job / "model").iterdir()} == {"config.json", "tokenizer.json"}
    assert (job / "data/train.json").stat().st_size
    assert (job / results).is_dir()


@pytest.mark.parametrize(
    ("place", "output", "said"),
    [
        (".", "job", "--output {folder}/job: it is in {folder}, which is copied into it"),
        ("job/model/step-5", "job", "--output {folder}/job: {folder}/job/model/step-5 is in it"),
    ],
)
def test_a_model_is_not_copied_into_itself_or_replaced(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, place: str, output: str, said: str
) -> None:
    model, words = tmp_path / place, (*RENDER, "--demo", "--output", str(tmp_path / output))
    assert place == "." or run(capsys, *words).code == 0
    model.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "tokenizer.json"):
        (model / name).write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    result = run(capsys, *words, "--model", str(model))

    assert result.code == 2
    assert said.format(folder=tmp_path) in result.err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_with_other_files_stays_as_it_is(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code/mine").touch()
    result = run(capsys, *RENDER, "--output", str(tmp_path))

    assert result.code == 2
    assert "it contains other files" in result.err
    assert "that `--to slurm-script` wrote" in result.err
    assert [path.name for path in tmp_path.rglob("*")] == ["code", "mine"]


def test_a_dry_run_writes_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    nodes = ("--nodes", "2", "--job-name", "bert", "--instance-type", "m7i.metal-48xl")
    words = ("--demo", "--report-to", "wandb", "--dry-run", "--output", str(tmp_path / "job"))
    result = run(capsys, *SLURM, *nodes, *words)

    assert result.out == "job bert: 2 nodes, each with 2 ranks of 48 threads\n"
    assert "or WANDB_MODE=offline: before sbatch, run `export WANDB_API_KEY=…`" in result.err
    assert not (tmp_path / "job").exists()
