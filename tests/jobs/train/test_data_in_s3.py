"""Data in S3, as the laptop sees them: URLs are checked, translated for the nodes, and never read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from infra.errors import UsageError
from infra.files import parse_as
from jobs.places.record import JobRecord
from jobs.program.folder import choose_folders, read_urls
from jobs.train.request import TrainRequest, check_inputs, spec_of, staged_data
from jobs.train.resume import ResumeRequest, plan_again
from jobs.train.train import plan_training
from jobs.worker.spec import PlacementOptions
from jobs.worker.tasks.classify import ClassifyOptions
from jobs.worker.tasks.squad.task import SquadOptions
from jobs.worker.training.options import TextOptions
from provision.stacks.load import load_stack
from tests.jobs.context import PATHS, SUBMITTED

STACK = load_stack("upstream")
DATA, EVAL = "s3://my-data/set/reviews.csv.gz", "s3://my-data/dev"


def plan_of(options: TextOptions) -> TrainRequest:
    return TrainRequest(spec_of(options), Path("results"))


def test_nodes_stage_what_the_options_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dev").mkdir()  # a local folder of that name is something else
    options = ClassifyOptions(data=DATA, eval=EVAL, model="scratch")
    check_inputs(options)
    plan = plan_training(plan_of(options), STACK)
    assert plan.spec.storage.stage == ((DATA, "data/train.csv.gz"), (EVAL, "data/eval"))
    assert not [name for name in plan.files if name.startswith("data")]
    sent = ClassifyOptions.from_json(plan.argv[1])
    assert (sent.data, sent.eval) == ("data/train.csv.gz", "data/eval")
    assert plan.env["HF_HUB_OFFLINE"] == "1"
    names = json.loads(plan.env["SPR_NAMES"])
    assert names == {"data/train.csv.gz": DATA, "data/eval": EVAL}


def test_the_name_in_s3_says_the_format() -> None:
    for folder in ("s3://my-data/v1.2", "s3://my-data/train.txt/", "s3://my-data"):
        check_inputs(ClassifyOptions(data=folder, model="scratch"))
    for file in ("s3://my-data/train.jsonl.bz2", "s3://my-data/train.doc.gz"):
        with pytest.raises(UsageError, match="its name does not say its format"):
            check_inputs(ClassifyOptions(data=file, model="scratch"))


def test_squad_reads_an_object_as_json() -> None:
    options = SquadOptions(data="s3://my-data/squad", model="scratch")
    check_inputs(options)
    assert staged_data(options) == (("s3://my-data/squad", "data/train.json"),)
    with pytest.raises(UsageError, match="--eval s3://my-data/squad/: expected a file"):
        check_inputs(replace(options, eval="s3://my-data/squad/"))


def test_a_teacher_in_s3_is_checked_on_the_nodes(tmp_path: Path) -> None:
    data = tmp_path / "rows.csv"
    data.write_text("text,label\none,a\ntwo,b\n")
    options = ClassifyOptions(data=str(data), teacher="s3://my-data/scores.csv", model="scratch")
    check_inputs(options)
    assert staged_data(options) == (("s3://my-data/scores.csv", "data/teacher.csv"),)
    data.write_text("text,label\none,a\ntwo\n")
    with pytest.raises(UsageError, match="line 3: has 1 columns"):
        check_inputs(options)


def test_resumed_job_stages_its_data_again() -> None:
    plan = plan_training(plan_of(ClassifyOptions(data=DATA, model="scratch")), STACK)
    record = replace(
        SUBMITTED,
        kind="classify",
        argv=("python", "-m", plan.module, *plan.argv),
        nnodes=3,
        options=PlacementOptions("auto", 1, None),
        more={"stage": plan.spec.storage.stage},
    )
    read = parse_as(JobRecord, record.render(), "job.json")
    again = plan_again(read, ResumeRequest("classify", None), 3, PATHS.job_id)
    assert again.spec.storage.stage == ((DATA, "data/train.csv.gz"),)


def test_programs_find_data_under_their_last_name(tmp_path: Path) -> None:
    (tmp_path / "spr-cluster.toml").touch()
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "x.png").touch()
    sent = choose_folders(None, (), tmp_path, None)
    urls = ("s3://my-data/set/texts/", "s3://other")
    assert read_urls(urls, sent) == ((urls[0], "work/texts"), (urls[1], "work/other"))
    with pytest.raises(UsageError, match="the job has another images"):
        read_urls(("s3://my-data/images",), sent)
    with pytest.raises(UsageError, match="the job has another texts"):
        read_urls((urls[0], "s3://other/texts"), sent)
