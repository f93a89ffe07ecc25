"""The page of recipes, command by command, with small data in the files that it names."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import boto3
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.e2e.conftest import Baked, CommandLine, LiveCluster, podman
from tests.jobs.worker.training.test_run import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
SMALL = (
    "--model scratch --epochs 8 --batch-size 8 --learning-rate 1.5e-3 --dtype fp32 --compile off"
)
TOPICS = {
    "sun": "hot",
    "moon": "cold",
    "sea": "deep",
    "hill": "steep",
    "road": "long",
    "snow": "white",
}
"""Questions about one are answered by the other."""
_SCRIPT = """\
from pathlib import Path
from transformers import DistilBertConfig, DistilBertForSequenceClassification
from transformers import HfArgumentParser, Trainer, TrainingArguments
from spr_cluster import speed_up

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
args.max_steps, args.per_device_train_batch_size, args.logging_steps = 4, 2, 1
shape = dict(vocab_size=99, dim=32, n_layers=2, n_heads=2, hidden_dim=64)
model = DistilBertForSequenceClassification(DistilBertConfig(**shape))
row = {"input_ids": [5, 6, 7, 8], "attention_mask": [1, 1, 1, 1]}
trainer = Trainer(model, args, train_dataset=[{**row, "labels": n % 2} for n in range(32)])
speed_up(trainer)
trainer.train()
trainer.save_model()
Path(f"rank-{args.process_index}.txt").write_text(f"{args.world_size} ranks")
"""


def commands_of(title: str) -> list[str]:
    """Return the command lines below a heading, without comments; a line that ends in \\ continues."""
    section = re.search(rf"(?ms)^# {title}$(.*?)(^#|\Z)", PAGE.replace("\n## ", "\n# "))
    assert section, title
    joined = section[1].replace("\\\n", "")
    return [" ".join(line.split()) for line in re.findall(r"(?m)^ {4}(\w.*)", joined)]


@dataclass(frozen=True)
class Reader:
    """Somebody who follows the page in a folder."""

    cli: CommandLine
    folder: Path
    s3: Any

    def run(self, command: str, **changed: str) -> str:
        """Run a line of the page, with some words replaced; return what it prints."""
        for word, value in changed.items():
            assert word in command, command
            command = command.replace(word, value)
        done = subprocess.run(
            ["bash", "-c", command],
            env=self.environment,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def train(self, command: str) -> Any:
        self.run(f"{command} {SMALL}")
        return json.loads((self.newest() / "results.json").read_text())

    def newest(self) -> Path:
        return max(self.folder.glob("results/*"), key=lambda path: path.stat().st_mtime)

    @property
    def environment(self) -> dict[str, str]:
        return {**self.cli.environment, "PATH": f"{self.cli.programs}:{os.environ['PATH']}"}


@pytest.fixture(scope="module")
def reader(
    cli: CommandLine, baked: Baked, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Reader]:
    """The cluster at the top of the page, with two nodes, and its bucket."""
    cli = replace(cli, home=tmp_path_factory.mktemp("reader"))
    folder = tmp_path_factory.mktemp("recipes")
    (folder / "spr-cluster.toml").write_text('[cluster]\ncloud = "local"\nname = "recipes"\n')
    found = cli.json("local", "bucket", "my-data")
    s3: Any = boto3.client(
        "s3",
        endpoint_url=found["AWS_ENDPOINT_URL_S3"],
        region_name=found["AWS_REGION"],
        aws_access_key_id=found["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=found["AWS_SECRET_ACCESS_KEY"],
    )
    reader = Reader(cli, folder, s3)
    (up,) = commands_of("Recipes")
    reader.run(up, **{"--nodes 4": "--nodes 2"})
    yield reader
    cli.run("down", "--name", "recipes", "--yes", "--cloud", "local", check=None)


def write_table(path: Path, header: list[str], rows: Sequence[tuple[str, ...]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])


def test_reviews_to_a_classifier(reader: Reader) -> None:
    words = {"good": ("excellent", "lovely", "great"), "bad": ("dull", "awful", "poor")}
    things = ("read", "story", "ending", "hero", "plot", "style", "first page", "translation")
    rows = [
        (f"{a} {thing}", label) for label, all_ in words.items() for a in all_ for thing in things
    ]
    write_table(reader.folder / "reviews.csv", ["text", "label"], rows * 2)
    write_table(reader.folder / "new-reviews.csv", ["text"], [(text,) for text, _ in rows])
    train, one, many = commands_of("Reviews to a classifier")

    # So small a model may lose more points than the page allows.
    result = reader.train(f"{train} --max-loss 100")

    assert (result["task"], result["world_size"]) == ("classify", 2)
    assert (Path(result["data"]).name, len(result["eval_digest"])) == ("reviews.csv", 32)
    assert result["scores"]["accuracy"] > 80
    assert [form["form"] for form in result["export"]["forms"]] == ["PyTorch, fp32", "int8"]
    assert (reader.newest() / "model/openvino/openvino_model.xml").is_file()
    assert reader.run(one).split()[0] in words
    reader.run(many)
    with (reader.folder / "labeled.csv").open(newline="") as file:
        labeled = list(csv.DictReader(file))
    assert [row["text"] for row in labeled] == [text for text, _ in rows]
    right = sum(row["label"] == label for row, (_, label) in zip(labeled, rows, strict=True))
    assert right > 0.8 * len(rows)


@contextmanager
def serving(reader: Reader, command: str, port: int) -> Iterator[None]:
    """Run the server, whose packages are those of this Python, until it is no longer needed."""
    argv = command.removesuffix(" &").replace("spr-cluster", f"{sys.executable} -m jobs").split()
    paths = {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        [*argv, "--port", str(port)],
        env={**reader.environment, **paths},
        cwd=reader.folder,
        stderr=subprocess.DEVNULL,
    ) as process:
        until = time.monotonic() + 120
        check = ["curl", "--silent", "--fail", f"localhost:{port}/health"]
        while subprocess.run(check, capture_output=True).returncode:
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.2)
        yield
        process.terminate()


def test_questions_to_search(reader: Reader) -> None:
    ask = ("How is the {}?", "Tell me of the {}.", "What is the {} like?", "Describe the {}.")
    rows = [(a.format(x), f"The {x} is {y}.") for a in ask for x, y in TOPICS.items()]
    write_table(reader.folder / "questions.csv", ["question", "passage"], rows * 2)
    train, serve, curl = commands_of("Questions to search")

    # The other recipes train from local files.
    reader.s3.upload_file(str(reader.folder / "questions.csv"), "my-data", "questions.csv")
    result = reader.train(train.replace("questions.csv", "s3://my-data/questions.csv"))

    assert result["task"] == "embed"
    assert result["scores"]["mrr"] > 50
    port = free_port()
    with serving(reader, serve, port):
        answer = json.loads(reader.run(f"{curl} --silent", **{"8000": str(port)}))
    (vector,) = [each["embedding"] for each in answer["data"]]
    assert sum(x * x for x in vector) == pytest.approx(1, abs=1e-3)


def test_ten_million_rows_to_vectors(reader: Reader, tmp_path: Path) -> None:
    for number, (thing, what) in enumerate(TOPICS.items()):
        file = BytesIO()
        pq.write_table(pa.table({"text": [f"The {thing} is {what}.", f"A {thing}"]}), file)
        key = f"texts/{number}.parquet"
        reader.s3.put_object(Bucket="my-data", Key=key, Body=file.getvalue())
    (command,) = commands_of("Ten million rows to vectors")

    # Here are no results, so the model comes from the cluster.
    shutil.copy(reader.folder / "spr-cluster.toml", tmp_path)
    elsewhere = replace(reader, folder=tmp_path)
    elsewhere.run(command, **{"embed-20261124-142501-k3f": reader.newest().name})

    kept = reader.s3.list_objects_v2(Bucket="my-data", Prefix="vectors/")["Contents"]
    parts = [each["Key"] for each in kept if each["Key"].endswith(".parquet")]
    read = [reader.s3.get_object(Bucket="my-data", Key=each)["Body"].read() for each in parts]
    rows = pa.concat_tables(pq.read_table(BytesIO(each)) for each in read).to_pylist()
    assert {row["text"] for row in rows} >= {"The sun is hot.", "A snow"}
    assert (len(rows), {len(row["embedding"]) for row in rows}) == (12, {128})


def test_contracts_to_names(reader: Reader) -> None:
    names = ("Ada", "Grace", "Alan", "Edsger", "Barbara", "Donald", "Tony", "Leslie")
    verbs = ("signs", "pays", "leaves", "owns")
    sentences = [f"{n} B-PER\n{v} O\ntoday O\n" for n in names for v in verbs]
    (reader.folder / "contracts.conll").write_text("\n".join(sentences * 2))
    texts = [f"{name} pays today" for name in names]
    write_table(reader.folder / "new-contracts.csv", ["text"], [(text,) for text in texts])
    train, predict = commands_of("Contracts to names")

    assert reader.train(train)["scores"]["f1"] > 80
    reader.run(predict)

    lines = (reader.folder / "names.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert [row["words"] for row in found] == [text.split() for text in texts]
    assert sum(row["tags"] == ["B-PER", "O", "O"] for row in found) > 0.8 * len(texts)


def test_your_trainer_script_overnight(reader: Reader) -> None:
    """This ends the cluster, so it is the last test."""
    (reader.folder / "finetune.py").write_text(_SCRIPT)
    run, fetch, down = commands_of("Your Trainer script, overnight")
    status = reader.cli.json("status", "--cloud", "local")
    machines = {node["instance"] for node in status["nodes"]}
    cluster = LiveCluster(reader.cli, status)

    shown = reader.run(run)

    job = re.search(r"run-\d{8}-\d{6}-\w{3}", shown)
    assert job, shown
    until = time.monotonic() + 240
    while any(name.endswith((*machines,)) for name in podman("ps", "--format={{.Names}}").split()):
        assert time.monotonic() < until, "the nodes have not powered off"
        time.sleep(1)
    reader.run(fetch, JOB=job[0])
    results = reader.folder / "results" / job[0]
    assert (results / "model/model.safetensors").is_file()
    for rank, node in enumerate(cluster.names):
        assert (results / "work" / node / f"rank-{rank}.txt").read_text() == "2 ranks"
    steps = (results / "job/metrics/rank-1.jsonl").read_text().splitlines()
    assert len(steps) == 4
    reader.run(down)
    assert reader.cli.json("status", "--name", "recipes", "--cloud", "local")["resources"] == {}
