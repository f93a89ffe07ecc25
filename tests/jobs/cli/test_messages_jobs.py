"""Messages for usage errors in commands on jobs and the embedded cloud.

Each row is a command line, or a file, and its exact message.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.worker.tasks import TASKS
from jobs.worker.tasks.squad.task import SAMPLE
from tests.harness import failures as f
from tests.harness.command_line import CommandLine, numbered
from tests.infra.local.fakes import Endpoint

_S3 = ": expected s3://BUCKET or s3://BUCKET/PREFIX"
_FILLED = "\n  → a folder that `spr-cluster train` or `spr-cluster fetch` has filled"
_ROWS: tuple[tuple[str, f.Message], ...] = (
    # The embedded cloud
    ("local", "the following arguments are required: ACTION" + f.help_of("local")),
    (
        "local boot",
        f.choice(
            "argument ACTION: invalid choice: 'boot'",
            "local",
            "status",
            "stop",
            "reset",
            "bucket",
        ),
    ),
    # Training
    ("train", "the following arguments are required: JOB" + f.help_of("train")),
    (
        "train bert",
        f.choice("argument JOB: invalid choice: 'bert'", "train", *TASKS),
    ),
    (
        "train squad --ppn 0",
        "argument --ppn: '0': expected a whole number of at least 1" + f.help_of("train squad"),
    ),
    (
        "train squad --ppn x",
        "argument --ppn: 'x': expected a whole number of at least 1" + f.help_of("train squad"),
    ),
    ("train squad --data nowhere.json", "nowhere.json: can't be read: No such file or directory"),
    ("train squad --eval .", ".: can't be read: Is a directory"),
    # A server
    (
        "serve --host 0.0.0.0",
        "--host 0.0.0.0 needs --token-file: others could use the model"
        "\n  → head -c 24 /dev/urandom | base64 > token",
    ),
    ("serve ./nowhere", "./nowhere: no such folder"),
    (
        "serve classify-1",
        "results/classify-1: no such folder\n  → `spr-cluster fetch JOB` brings a job's model here",
    ),
    ("serve --token-file nowhere", "nowhere: can't be read: No such file or directory"),
    (
        "serve --port 70000",
        "argument --port: '70000': expected a number from 0 to 65535" + f.help_of("serve"),
    ),
    ("train squad --epochs 20000", "--epochs 20000 is out of range: 0 to 10000"),
    ("train squad --batch-size 5000", "--batch-size 5000 is out of range: 1 to 4096"),
    ("train squad --learning-rate nan", "--learning-rate nan is out of range: 1e-08 to 1"),
    ("train squad --warmup-ratio 2", "--warmup-ratio 2.0 is out of range: 0 to 1"),
    ("train squad --max-length 8", "--max-length 8 is out of range: 16 to 8192"),
    (
        "train squad --stride 300",
        "--stride 300 is out of range: at most half of --max-length (384), or features would "
        "hardly advance",
    ),
    ("train squad --seed -1", "--seed -1 is out of range: 0 to 2147483647"),
    (
        "train classify --data a.csv --eval b.csv --eval-fraction 0.1",
        "--eval-fraction would have no effect beside --eval: omit one",
    ),
    (
        "run --folder none --own-torch -- hostname",
        "--own-torch has no effect: the program has no packages to install"
        "\n  → name a list with --packages, or omit it",
    ),
    (
        "train squad --dtype fp16",
        f.choice("argument --dtype: invalid choice: 'fp16'", "train squad", "auto", "bf16", "fp32"),
    ),
    (
        "train squad --backend nccl",
        f.choice(
            "argument --backend: invalid choice: 'nccl'", "train squad", "auto", "ccl", "gloo"
        ),
    ),
    ("train squad --max-steps 0", "--max-steps 0 is out of range: 1 to 1000000000"),
    ("train squad --model ./nowhere", "--model ./nowhere: no such folder"),
    ("train squad --model ~nobody-here/model", "--model ~nobody-here/model: no such folder"),
    (
        "train squad --model .",
        "--model .: not a model folder, because it has no config.json\n  → give a folder written "
        "by save_pretrained, or the name of a model on the hub",
    ),
    ("train squad --model ''", "--model" + f.EMPTY),
    (
        "train squad --dataset other --data x.json",
        "--data and --dataset can't be used together",
    ),
    ("train squad --demo --results /dev/null", "--results /dev/null: /dev/null is not a folder"),
    (
        "train squad --demo --results /dev/null/x",
        "--results /dev/null/x: /dev/null is not a folder",
    ),
    (
        "train squad --trial-seconds 3",
        "unknown option '--trial-seconds'; did you mean --trials?" + f.help_of("train squad"),
    ),
    (
        "train squad --resume --seed 3 --demo",
        "--demo, --seed: a resumed job keeps its own\n  → omit it, or start a new job "
        "without --resume",
    ),
    ("train squad --resume --learning-rate 2", "--learning-rate 2.0 is out of range: 1e-08 to 1"),
    (
        "train squad --resume --ppn 0",
        "argument --ppn: '0': expected a whole number of at least 1" + f.help_of("train squad"),
    ),
    ("train squad --resume ''", "--resume" + f.EMPTY),
    (
        "train squad --resume s3://results/team/tag-1",
        "job tag-1 is not one of `train squad`",
    ),
    (
        "train squad --resume s3://results",
        "--resume s3://results: expected a job's folder, such as "
        "s3://results/squad-20260731-142501-k3f",
    ),
    ("train squad --checkpoint-every 0", "--checkpoint-every 0 is out of range: 1 to 1000000000"),
    ("train squad --keep-checkpoints 0", "--keep-checkpoints 0 is out of range: 1 to 1000"),
    # The published recipe
    (
        "train squad --nodes 0",
        "argument --nodes: '0': expected a whole number of at least 1" + f.help_of("train squad"),
    ),
    (
        "train squad --recipe slow",
        f.choice("argument --recipe: invalid choice: 'slow'", "train squad", "fast", "reference"),
    ),
    (
        "train squad --preset bert",
        f.choice(
            "argument --preset: invalid choice: 'bert'", "train squad", "distilbert", "bert-large"
        ),
    ),
    (
        "train squad --recipe reference --epochs 3 --ppn 2 --retries 3",
        "--epochs, --ppn, --retries: --recipe reference is the published command, with its own settings\n"
        "  → use --preset and --nodes to choose among those, or --recipe fast with these options",
    ),
    (
        "train squad --recipe reference --smoke --nodes 2",
        "--smoke runs on one node: omit --nodes",
    ),
    ("train squad --smoke", "--smoke requires --recipe reference"),
    (
        "train squad --recipe reference --run-qa .",
        "--run-qa .: no run_qa.py in it\n  → give the folder examples/pytorch/question-answering of "
        "transformers' source",
    ),
    # Any program
    ("run", "the following arguments are required: PROGRAM" + f.help_of("run")),
    (
        "run --nodes 0 -- hostname",
        "argument --nodes: '0': expected a whole number of at least 1" + f.help_of("run"),
    ),
    ("run python x.py --lr 1", "unknown option '--lr'" + f.help_of("run")),
    ("run -- ''", "program: a word is empty"),
    (
        "run -- python x.py",
        re.compile(r"x\.py: no such file in .*\n  → the command's script must be in .*"),
    ),
    ("run --files nowhere -- hostname", "--files nowhere: no such file or folder"),
    ("run --env A -- hostname", "--env A is not set on this machine\n  → export A=…"),
    (
        "run --env RANK=1 -- hostname",
        "--env RANK: the placement sets it for each rank\n"
        "  → --nodes, --ppn, --placement, and --ccl-workers control it",
    ),
    ("run --results /dev/null -- hostname", "--results /dev/null: /dev/null is not a folder"),
    # Stored in S3
    ("train squad --demo --push-to models", "--push-to models" + _S3),
    ("fetch --push-to s3://Models/x", "--push-to s3://Models/x" + _S3),
    ("fetch --push-to ''", "--push-to" + f.EMPTY),
    (
        "iam-policy --push-to s3://models/../x",
        "--push-to s3://models/../x" + _S3 + ", without empty parts, `.`, or `..`",
    ),
    # Fetched
    (
        "fetch ../squad-1",
        "argument JOB: '../squad-1' is not a job ID: expected one such as squad-20260731-142501-k3f; "
        "`spr-cluster jobs` lists them\n  → spr-cluster fetch --help",
    ),
    ("fetch ''", "JOB" + f.EMPTY),
    ("fetch --results /dev/null", "--results /dev/null: /dev/null is not a folder"),
    ("jobs --name A", re.compile("--name A: expected at most 32 lowercase letters.*")),
    # Reported
    ("report", "no results in ./results\n  → name a results folder, or train first"),
    ("report ''", "DIR|JOB" + f.EMPTY),
    (
        "report squad-1",
        "squad-1: no such folder, and none in ./results\n  → spr-cluster fetch squad-1",
    ),
    ("report ./x/y", f"./x/y: no such folder, and none in ./results{_FILLED}"),
    ("report /dev/null", re.compile("/dev/null is a file: expected .*")),
    ("report .", f".: contains neither results.json nor job/metrics/rank-0.jsonl{_FILLED}"),
    (
        "report --compare nowhere",
        "no results in ./results\n  → name a results folder, or train first",
    ),
    ("report . --price 0", "--price 0: expected US dollars per hour, above 0, at most 1000"),
    ("report . --price nan", "--price nan: expected US dollars per hour, above 0, at most 1000"),
    (
        "report . --price 1 --instance-type r7iz.metal-16xl",
        "--price and --instance-type can't be used together",
    ),
    ("report . --instance-type x", re.compile("the table has no price of 'x'.*", re.DOTALL)),
    ("jobs squad-1 --all", "JOB and --all can't be used together"),
    # Sent to the hub
    *(
        (
            f"train digits --push-to {place} --env HF_TOKEN=x",
            f"--push-to {place}: expected hub:ORG/NAME, of letters, digits, '-', '_', and '.'",
        )
        for place in (
            "hub:",
            "hub:me",
            "hub:a/b/c",
            "hub:a/b--c",
            "hub:a/..b",
            "hub:-a/b",
            "hub:a/é",
        )
    ),
    (
        "train digits --push-to hub:team/x-1.5 --env HF_TOKEN= --env A=1",
        "--push-to hub:team/x-1.5: needs your login: add --env HF_TOKEN",
    ),
    (
        "train digits --push-to hub:team/x --resume",
        "--push-to hub:team/x: a resumed job keeps its own",
    ),
    (
        "train squad --recipe reference --push-to hub:team/x",
        "--push-to hub:team/x: not with --recipe reference",
    ),
    (
        "fetch --push-to hub:team/x",
        "--push-to hub:team/x: only `train` sends a model to the hub, from the nodes\n"
        "  → hf upload team/x results/JOB/model --private",
    ),
    # Predicted
    ("predict", "give texts, or a file with --data" + f.help_of("predict")),
    (
        "predict Where? --data a.csv --output b.csv",
        "give texts, or a file with --data" + f.help_of("predict"),
    ),
    ("predict --data a.csv", "--data and --output belong together"),
    ("predict --output a.csv Where?", "--data and --output belong together"),
    ("predict Where? --nodes all", "--nodes requires --data"),
    ("predict Where? --detach", "--detach requires --data"),
    ("predict Where? --retries 0", "--retries requires --data"),
    ("predict --data a.csv --output b.csv --context x", "--context is for texts, not for --data"),
    (
        "predict --data a.csv --output b.csv --nodes 0",
        re.compile("argument --nodes: '0': expected a whole number.*", re.DOTALL),
    ),
    (
        "predict --data here --output b.txt",
        "--output b.txt: its name does not say its format\n  → one of .csv, .jsonl, .parquet; without a "
        "suffix, it is a folder for Parquet files",
    ),
    ("predict ' ' --context text", "a text is empty"),
    ("predict Where? --context nowhere.txt", "--context nowhere.txt: no such file"),
    ("predict Where? --context ''", "--context" + f.EMPTY),
    ("predict Where? --context .", "--context .: is a folder"),
    ("predict Where? --context here --model ./x", "--model ./x: no such folder"),
    (
        "predict Where? --context here --model .",
        "--model .: no config.json in . or model" + _FILLED.replace("→ a", "→ give a"),
    ),
    (
        "predict Once --temperature -1",
        "argument --temperature: '-1': expected 0, or a number from 0.01 to 100"
        + f.help_of("predict"),
    ),
    (
        "predict Once --temperature 1 --top-p 0",
        "argument --top-p: '0': expected a number above 0, at most 1" + f.help_of("predict"),
    ),
    ("predict Once --top-p 0.5", "--top-p requires --temperature"),
    ("predict Once --seed 1", "--seed requires --temperature"),
    (
        "predict Once --perplexity --max-new-tokens 9",
        "--max-new-tokens has no effect on --perplexity",
    ),
    ("predict Once --env A=1", "--env requires --data"),
    ("predict Once --merge new", "texts can't be used with --merge"),
    ("predict --merge .", "--merge .: exists already\n  → name a new folder"),
    ("predict --merge new --perplexity", "--perplexity can't be used with --merge"),
    # Measuring and trials
    ("bench --seconds 0", "--seconds 0 is out of range: 0.1 to 600"),
    ("bench --seconds nan", "--seconds nan is out of range: 0.1 to 600"),
    ("bench --seconds 601", "--seconds 601 is out of range: 0.1 to 600"),
    (
        "bench --last --seconds 9",
        "argument --seconds: not allowed with argument --last" + f.help_of("bench"),
    ),
    ("train lm --demo --lora-rank 8", "--lora-rank requires --lora"),
    ("bench fast", "unknown argument 'fast'" + f.help_of("bench")),
    ("tune", "the following arguments are required: JOB" + f.help_of("train")),
    ("tune squad --ppn 1", "--ppn: --tune varies it\n  → omit one of the two"),
    (
        "study squad --tune placement=1",
        "--tune placement: `train squad` has no such option to vary",
    ),
    (
        "study squad --tune epochs=1,2 --tune ppn=1,2",
        "--tune: --ppn changes the speed, --epochs what is learned\n  → run two studies, the one of "
        "the speed first",
    ),
    ("tune squad --model ./nowhere", "--model ./nowhere: no such folder"),
    ("tune squad --data nowhere.json", "nowhere.json: can't be read: No such file or directory"),
    ("tune squad --stride 300", re.compile("--stride 300 is out of range: .*")),
    ("tune squad --scaling", "unknown option '--scaling'" + f.help_of("train squad")),
)


@pytest.fixture(scope="module")
def line(endpoint: Endpoint) -> Iterator[CommandLine]:
    with f.one_for_all(endpoint) as line:
        yield line


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("argv", "message"), _ROWS, ids=numbered(row[0] for row in _ROWS))
def test_a_usage_error_names_what_is_valid(
    line: CommandLine, argv: str, message: f.Message
) -> None:
    f.expect_refusal(line, shlex.split(argv), message)


_ANSWER = {"text": "b", "answer_start": 2}
_QUESTION = {"id": "q", "question": "?", "answers": [_ANSWER]}
_DATA = (
    ("[", "is not JSON: Expecting value (line 1, column 2)"),
    ("[]", re.compile(r".*")),
    (
        {"context": "a b", "qas": [{**_QUESTION, "answers": [{**_ANSWER, "answer_start": 0}]}]},
        re.compile(r"data\[0\] 't', paragraphs\[0\], qas\[0\] \(id 'q'\): answer_start 0.*"),
    ),
)


@pytest.mark.parametrize(("content", "message"), _DATA, ids=["text", "list", "record"])
def test_broken_training_data_is_answered_with_the_record(
    line: CommandLine, content: object, message: f.Message
) -> None:
    text = content
    if not isinstance(text, str):
        text = json.dumps({"data": [{"title": "t", "paragraphs": [content]}]})
    Path("train.json").write_text(text)
    pattern = re.escape(message) if isinstance(message, str) else message.pattern
    result = re.compile(f"train.json: {pattern}", re.DOTALL)
    f.expect_refusal(line, ["train", "squad", "--data", "train.json"], result)


_SENDING = (
    "train squad --data {}",
    "train squad --data train.json --eval {}",
    "tune squad --data {}",
    "study squad --tune epochs=1,2 --data {}",
    "run --files {} -- hostname",
    "predict Who? --context {}",
    "predict --data {} --output out.csv",
)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("command", _SENDING)
def test_only_regular_files_are_read_and_sent(line: CommandLine, command: str) -> None:
    shutil.copy(SAMPLE, "train.json")
    os.mkfifo("pipe")
    reader, writer = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener, os.fdopen(reader), os.fdopen(writer, "w"):
        listener.bind("socket")
        substituted = f"/dev/fd/{reader}"  # as a shell's <(…)
        kinds = {"pipe": "pipe", substituted: "pipe", "socket": "socket", "/dev/zero": "device"}
        for file, kind in kinds.items():
            path = Path(file).absolute() if command.startswith("run") else file
            message = (
                f"{path}: is a {kind}\n  → save its content to a regular file and use that instead"
            )
            f.expect_refusal(line, command.format(file).split(), message)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("command", "limit"),
    [
        ("train squad --data {}", "2.0 GiB"),
        ("train squad --data train.json --eval {}", "2.0 GiB"),
        ("predict Who? --context {}", "64.0 MiB"),
        ("predict --data {} --output out.csv", "2.0 GiB"),
    ],
)
def test_a_file_of_any_size_takes_no_memory(line: CommandLine, command: str, limit: str) -> None:
    shutil.copy(SAMPLE, "train.json")
    with Path("huge").open("wb") as file:
        file.truncate(200 << 30)  # of holes
    message = f"huge: file is too large: 200.0 GiB, limit {limit}"
    f.expect_refusal(line, command.format("huge").split(), message)


@pytest.mark.parametrize("command", ["train squad --model m", "predict Who? --context A --model m"])
def test_a_model_consists_of_regular_files(line: CommandLine, command: str) -> None:
    Path("m").mkdir()
    Path("m/config.json").write_text("{}")
    os.mkfifo("m/tokenizer.json")
    message = (
        "m/tokenizer.json: is a pipe\n  → save its content to a regular file and use that instead"
    )
    f.expect_refusal(line, command.split(), message)
