"""Questions to a model: here, and on a head that is this machine's bash and Python."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import jobs.train.predict
from infra.errors import JobError, UsageError
from infra.wait import Silent
from jobs.cli import main
from jobs.places.plan import JobPaths, new_job_id
from jobs.places.record import CloudInfo
from jobs.train.predict import (
    OnHead,
    PredictRequest,
    check_model,
    check_prediction,
    find_model,
    local_base,
    make_rows,
    plan_prediction,
    predict_file_here,
    predict_here,
    predict_on_nodes,
    read_context,
    read_rows,
)
from jobs.worker.corpus.options import PredictOptions
from jobs.worker.runtime.errors import TrainingError
from jobs.worker.spec import JobSpec, Resources
from jobs.worker.tasks.adapters import ADAPTERS
from provision.host import Result
from provision.stacks.load import load_stack
from tests.fakes import FakeHost
from tests.harness.forked import Forked
from tests.jobs.context import (
    NOW,
    event,
    job_context,
    listed,
    make_hosts,
    mpirun_line,
    pack_output,
)
from tests.jobs.places.this_machine import ThisMachine
from tests.jobs.worker.tasks.test_generate import write_adapters, write_llama

TEXT = "The mill has stood in Delft since 1692. It grinds pepper."
WHERE = make_rows(["Where?"], TEXT)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model as a job leaves it; it knows nothing, but it answers."""
    from transformers import DistilBertConfig, DistilBertForQuestionAnswering

    from jobs.worker.training.model import new_tokenizer, train_tokenizer

    folder = tmp_path_factory.mktemp("results") / "squad-1" / "model"
    tokenizer = new_tokenizer(train_tokenizer([TEXT, "Where? Since when is it there?"]))
    config = DistilBertConfig(
        vocab_size=len(tokenizer), dim=16, n_layers=1, n_heads=2, hidden_dim=16
    )
    DistilBertForQuestionAnswering(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_answers_are_parts_of_the_text(model: Path, tmp_path: Path) -> None:
    found = predict_here(model, make_rows(["Where?", "Since when?"], TEXT))
    assert [each["question"] for each in found] == ["Where?", "Since when?"]
    for each in found:
        assert each["text"]
        assert TEXT[each["start"] :].startswith(each["text"])
    with pytest.raises(JobError, match="answers questions about a context") as refused:
        predict_here(model, make_rows(["Where?"], None))
    assert refused.value.hint == "`spr-cluster predict` takes it as --context"
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(JobError):
        predict_here(tmp_path, WHERE)


_PYTHON = "nice /opt/spr-cluster/venv/bin/python"
# Notes how Python would be started.
_NOTE = """#!/bin/bash
cd "$(dirname "$0")" && cat > stdin && env -0 > environ && printf '%s\\0' "$OLDPWD" "$@" > words
"""


@dataclass
class Head(ThisMachine):
    """A head whose home is a local folder; its Python has loaded the libraries already."""

    def run(self, command: str, **more: Any) -> Result:
        if _PYTHON not in command:
            return super().run(command, **more)
        note = self.root / "note"
        note.write_text(_NOTE)
        note.chmod(0o755)
        super().run(command.replace(_PYTHON, str(note)), **more)
        (folder, *words), variables = (
            (self.root / name).read_text().split("\0")[:-1] for name in ("words", "environ")
        )
        environ = dict(each.split("=", 1) for each in variables)
        code, said = Forked(words, Path(folder), environ, self.root / "stdin").finish(120)
        return Result(code, said, "")


def on_head(head: Head, model: Path) -> OnHead:
    return OnHead(head, model, None, lambda _: None)


@pytest.fixture
def head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Head:
    head = Head(tmp_path)
    head.home.mkdir()
    monkeypatch.setattr(jobs.train.predict, "_HOME", str(head.home))
    return head


def test_the_head_answers_with_a_model_of_this_machine_and_keeps_nothing(
    head: Head, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    question = "Since 'when' is it \"there\"; $(id) é?"
    rows = make_rows([question], TEXT)
    assert on_head(head, model).predict(rows) == predict_here(model, rows)
    with pytest.raises(JobError, match="the head could not answer"):
        on_head(head, tmp_path).predict(WHERE)

    def run_out(_: object, __: object, path: str) -> None:
        Path(path).touch()
        raise JobError("no space left")

    monkeypatch.setattr("jobs.train.predict.upload_archive", run_out)
    with pytest.raises(JobError, match="no space left"):
        on_head(head, tmp_path).predict(WHERE)
    assert list(head.home.glob("spr-predict*")) == []


@dataclass
class Elsewhere(Head):
    """A head that does not have a folder of this machine."""

    hidden: Path = Path()

    def run(self, command: str, **more: Any) -> Result:
        if "worker.tasks.predict" not in command:
            return super().run(command, **more)
        self.hidden.rename(self.hidden.with_name("hidden"))
        try:
            return super().run(command, **more)
        finally:
            self.hidden.with_name("hidden").rename(self.hidden)

    def download(self, command: str) -> Iterator[bytes]:
        yield subprocess.run(["bash", "-c", command], check=True, capture_output=True).stdout


def test_the_head_gets_the_model_of_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, adapters = write_llama(tmp_path / "base"), tmp_path / "model"
    write_adapters(base, adapters)
    head = Elsewhere(tmp_path, hidden=base)
    head.home.mkdir()
    monkeypatch.setattr(jobs.train.predict, "_HOME", str(head.home))
    rows, asked = make_rows(["the core", "first"], None), {"max_new_tokens": 5}
    found = predict_here(adapters, rows, asked)
    assert found != predict_here(base, rows, asked)
    assert on_head(head, adapters).predict(rows, asked) == found
    on_head(head, adapters).merge(tmp_path / "whole", lambda _: None)
    assert predict_here(tmp_path / "whole", rows, asked) == found
    assert list(head.home.glob("spr-predict*")) == []


def test_a_jobs_model_is_used_on_the_head_without_a_copy() -> None:
    listing = "".join(listed(f"squad-{n}", has_model=n < 3, submitted=100 * n) for n in range(1, 4))
    text = "in Delft\u2028\x85"
    said = json.dumps({"text": text, "score": 1.5, "start": 19}, ensure_ascii=False)
    answers: list[Any] = [
        ("listing the jobs", listing),
        ("worker.tasks.predict", f"noise\n{said}\n"),
        ("", ""),
    ]
    host = FakeHost("node0", answers)
    said_here: list[str] = []
    found = OnHead(host, None, None, said_here.append).predict(WHERE)
    assert said_here == ["using the model of squad-2, the newest on the cluster"]
    assert found[0]["text"] == text
    assert "/home/ubuntu/spr-jobs/squad-2/output/model <" in host.commands[-2]
    assert "HF_HUB_OFFLINE=1 " in host.commands[-2]
    assert host.commands[-1].startswith("rm -rf /home/ubuntu/spr-predict-")

    OnHead(host, None, "squad-1", said_here.append).predict(WHERE)
    assert "/home/ubuntu/spr-jobs/squad-1/output/model <" in host.commands[-2]
    with pytest.raises(UsageError, match="job squad-3 has no model: it is failed"):
        OnHead(host, None, "squad-3", said_here.append).predict(WHERE)
    with pytest.raises(JobError, match="the head gave 1 answer to 2 rows"):
        OnHead(host, None, None, said_here.append).predict(WHERE * 2)


def test_a_model_is_found_by_folder_job_or_age(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = list[str]()
    monkeypatch.chdir(tmp_path)
    for missing in (None, "squad-9"):
        assert find_model(missing, said.append) is None
    found = Path(shutil.copytree(model.parent.parent, "results"), "squad-1/model")
    for given in (None, "squad-1", "results/squad-1", str(found)):
        assert find_model(given, said.append) == found
    assert said == ["using the model of squad-1, the newest in results/"]
    with pytest.raises(UsageError, match=r"--model \./nowhere: no such folder"):
        find_model("./nowhere", said.append)
    with pytest.raises(UsageError, match=r"no config\.json in"):
        find_model(str(tmp_path), said.append)
    newest = Path("results/digits-2/model/model.safetensors")
    newest.parent.mkdir(parents=True)
    newest.touch()
    os.utime(newest, (4e9, 4e9))
    with pytest.raises(UsageError, match=f"^{newest.parent}, the newest model in ") as refused:
        find_model(None, said.append)
    assert (refused.value.hint, len(said)) == ("choose another with --model", 1)


def save_adapters(folder: Path, base: str, **more: str) -> Path:
    folder.mkdir(parents=True)
    config = {"base_model_name_or_path": base, "task_type": "CAUSAL_LM", **more}
    (folder / ADAPTERS).write_text(json.dumps(config))
    return folder


def test_adapters_are_a_model_with_a_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    base = tmp_path / "base"
    base.mkdir()
    adapters = save_adapters(Path("results/lm-2/model"), str(base))
    for given in ("lm-2", str(adapters), None):
        assert find_model(given, lambda _: None) == adapters
    check_model(adapters, {"temperature": 0.5})
    assert local_base(adapters) == base
    assert local_base(save_adapters(tmp_path / "hub", "org/base")) is None
    base.rmdir()
    with pytest.raises(
        UsageError, match=f"{adapters}: its adapters belong to the model in {base}, "
    ) as e:
        check_model(adapters)
    assert str(e.value.hint).startswith("put it there, or correct base_model_name_or_path in ")
    other = save_adapters(tmp_path / "other", "org/base", task_type="SEQ_CLS")
    with pytest.raises(UsageError, match="has adapters for SEQ_CLS, not those of `train lm`"):
        check_model(other)


def test_options_need_a_model_that_reads_them(model: Path, tmp_path: Path) -> None:
    message = "--temperature, --top-p: has no effect on models of `train squad`"
    with pytest.raises(UsageError, match=message):
        check_model(model, {"temperature": 1.0, "top_p": 0.5})
    check_model(model, has_context=True)
    with pytest.raises(UsageError, match="--context: has no effect on models of `train lm`"):
        check_model(write_llama(tmp_path), has_context=True)


def test_rows_come_from_standard_input() -> None:
    text = '\ufeffWhere?\r\n\n{"text": "a\u2028b"}\n'
    assert read_rows(text.encode(), None) == [{"text": "Where?"}, {"text": "a\u2028b"}]
    assert read_rows(text.encode(), "c")[1] == {"context": "c", "text": "a\u2028b"}
    assert read_rows(b"Who?", "c") == make_rows(["Who?"], "c")
    for content, message in (
        (b"a\xff", r"standard input: not UTF-8 \(byte 1\)"),
        (b" \n", "standard input has no lines"),
        (b"a\n{x", "standard input: row 2"),
    ):
        with pytest.raises(UsageError, match=message):
            read_rows(content, None)


def test_a_context_is_a_file_or_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_bytes(b"\xef\xbb\xbfSome text")
    Path("b.txt").write_bytes(b"\xff")
    Path("c.txt").write_text(" \n")
    assert read_context("a.txt") == "Some text"
    assert read_context(TEXT) == TEXT
    assert read_context("x" * 5000) == "x" * 5000
    for given, result in (
        ("b.txt", r"b\.txt: not UTF-8 \(byte 0\)"),
        ("c.txt", "--context contains no text"),
        ("nowhere.txt", r"--context nowhere\.txt: no such file"),
        ("./nowhere", "no such file"),
        (" ", "--context contains no text"),
    ):
        with pytest.raises(UsageError, match=result):
            read_context(given)


def rows_in(folder: Path, text: str = "review,question,context\ngood,Where?,in Delft\n") -> str:
    (folder / "rows.csv").write_text(text)
    return str(folder / "rows.csv")


def test_a_file_is_predicted_here(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out.jsonl"
    options = PredictOptions(str(model), rows_in(tmp_path), str(output))
    assert predict_file_here(options, Silent())["rows"] == 1
    assert json.loads(output.read_text())["answer"]
    assert {path.name for path in tmp_path.iterdir()} == {"rows.csv", "out.jsonl"}
    bad = rows_in(tmp_path, "question,context\n,in Delft\n")
    with pytest.raises(UsageError, match=r"rows\.csv: line 2: column 'question' is empty"):
        predict_file_here(PredictOptions(str(model), bad, str(output)), Silent())
    full = Mock(side_effect=TrainingError("no space left"))
    monkeypatch.setattr("jobs.worker.corpus.shards.write_part", full)
    with pytest.raises(JobError, match="no space left"):
        predict_file_here(replace(options, data=rows_in(tmp_path)), Silent())
    assert {path.name for path in tmp_path.iterdir()} == {"rows.csv", "out.jsonl"}


def test_a_folder_that_is_done_has_no_speed(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", str(model), "--data", rows_in(tmp_path), "--output", f"{tmp_path}/out"]
    for ending in (" rows/s", "/out: 1 row, all done before"):
        assert main(["predict", *words]) == 0
        assert capsys.readouterr().out.rstrip().endswith(ending)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("review,question,context\nLATEbad,,in\n", "line 1202: column 'question' is empty"),
        ("review,question,context\nLATEbad\n", "line 1202: has 1 columns"),
        ("review,question,passage\na,b,c\n", "which column? It has review, question, passage"),
    ],
)
def test_rows_are_checked_before_anything_starts(
    tmp_path: Path, model: Path, rows: str, message: str
) -> None:
    rows = rows.replace("LATE", 1200 * "good,Where?,in Delft\n")
    options = PredictOptions("", rows_in(tmp_path, rows), str(tmp_path / "o.csv"))
    with pytest.raises(UsageError, match=r"rows\.csv: ") as refused:
        check_prediction(options, model)
    assert message in refused.value.message
    good = replace(options, columns={"context": "review"}, skip_bad_records=True)
    check_prediction(good, model)
    with pytest.raises(UsageError, match=r"--output /proc: .*write to /proc"):
        check_prediction(replace(good, output="/proc/out.csv"), model)
    with pytest.raises(UsageError, match=r"rows\.csv: has no column 'reviews'; it has rev"):
        check_prediction(replace(options, columns={"text": "reviews"}))


def test_a_job_gets_the_model_of_another_job_on_the_head(tmp_path: Path, model: Path) -> None:
    options = PredictOptions("", "s3://my-data/rows.csv.gz", "out.parquet", {"text": "review"})
    folder, stack = "/home/ubuntu/spr-jobs/a-1/output/model", load_stack("upstream")
    plan = plan_prediction(PredictRequest(options, tmp_path), stack, (folder, ""))
    assert plan.head_folders == {"model": folder}
    assert plan.reads == ((options.data, "data/rows.csv.gz"),)
    assert (plan.spec.storage.stage, plan.files, plan.resumes) == ((), {}, True)
    there: dict[str, Any] = {
        "model": "model",
        "output": "output/predictions.parquet",
        "base": "data/base",
    }
    assert PredictOptions(**json.loads(plan.argv[0])) == replace(options, **there)
    local = PredictOptions("", rows_in(tmp_path), "out.csv")
    plan = plan_prediction(PredictRequest(local, tmp_path, model), stack)
    assert plan.files == {"data/rows.csv": tmp_path / "rows.csv", "model": model}


@pytest.mark.parametrize("base", ["", "/home/ubuntu/spr-jobs/squad-1/model"])
@pytest.mark.parametrize("is_on_head", [False, True])
def test_a_jobs_file_comes_home(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, is_on_head: bool, base: str
) -> None:
    results = {"task": "squad", "rows": 1, "skipped": 0, "rows_per_second": 2.0}
    hosts = make_hosts([event(event="result", **results)])
    head = hosts["node0"]
    if is_on_head:
        head.answers.insert(0, ("# listing the jobs", listed("squad-1", has_model=True)))
        head.answers.append(("# distributing a folder", ""))
        head.answers.append(("# looking for the model of adapters", f"{base}\n"))
    files = {"results.json": json.dumps(results), "predictions.csv": "answer\nDelft\n"}
    head.files["results.tar"] = pack_output(
        {f"output/{name}": text.encode() for name, text in files.items()}
    )
    output = tmp_path / "new" / "out.csv"
    options = PredictOptions("", rows_in(tmp_path), str(output))
    request = PredictRequest(
        options, tmp_path / "results", model, spec=JobSpec(resources=Resources(2, cores=1))
    )
    context = job_context(hosts, cloud=CloudInfo(usd_per_hour=6.0))
    assert predict_on_nodes(context, request)["rows"] == 1
    assert output.read_text() == "answer\nDelft\n"
    assert not (tmp_path / "results/predictions.csv").exists()
    assert " -n 2 " in (command := mpirun_line(head, JobPaths(new_job_id("predict", NOW))))
    assert '"usd_per_hour": 6.0' in command, "for half of each node"
    # The model that was fetched from the head is not sent to it again, nor that of its adapters.
    copied = re.findall(r"(?m)^.*(cp -r .*)", "\n".join(head.commands))
    root = "/home/ubuntu/spr-jobs/squad-1"
    expected = [f"cp -r {root}/output/model model", *([f"cp -r {base} data/base"] * bool(base))]
    assert copied == expected * is_on_head


def test_an_output_in_s3_is_tried_before_the_job_is_submitted(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts, url = make_hosts([]), "s3://my-data/out/"
    hosts["node0"].answers.insert(0, ("# removing the files of a job", "removed"))

    def refuse(_head: object, _paths: object, bucket: str, outputs: tuple[str, ...]) -> None:
        raise UsageError(f"{bucket}, {outputs}: denied")

    monkeypatch.setattr("jobs.places.files.check_places", refuse)
    options = PredictOptions("", rows_in(tmp_path), url)
    request = PredictRequest(options, tmp_path / "results", model)

    with pytest.raises(UsageError) as refused:
        predict_on_nodes(job_context(hosts), request)

    assert refused.value.message == f", ('{url}',): denied"
    assert not any("# submitting a job" in each for each in hosts["node0"].commands)
