"""Messages for usage errors in commands on jobs and the embedded cloud."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.worker.tasks.squad.task import SAMPLE
from tests.harness import failures as f
from tests.harness.command_line import CommandLine
from tests.infra.local.fakes import Endpoint
from tests.jobs.cli.transcript import check_transcript, refuse

MESSAGES = Path(__file__).parent / "golden/messages"
FILES = {
    "rows.csv": "review,question,context\ngood,Where?,in Delft\n",
    "empty.jsonl": "",
    "rows": "",
    "a.csv": "lr\n1\n2\n",
    "bare.csv": "lr\n",
    "empty.csv": "",
    "short.csv": "lr,seed\n1,2\n3\n",
    "name.csv": "learning rate\n1\n",
    "index.csv": "SPR_ARRAY_INDEX\n1\n",
    "twice.csv": "lr,lr\n1,2\n",
    "quote.csv": 'lr\n"1\n',
    "null.csv": "lr\n1\n\0\n",
    "null.env": "A=1\nB=\0secret\n",
}


@pytest.fixture(scope="module")
def line(endpoint: Endpoint) -> Iterator[CommandLine]:
    with f.one_for_all(endpoint) as line:
        yield line


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", sorted(path.name for path in MESSAGES.iterdir()))
def test_a_usage_error_names_what_is_valid(line: CommandLine, name: str) -> None:
    for file, content in FILES.items():
        Path(file).write_text(content)
    for folder in ("folder.csv", "bert/local"):
        Path(folder).mkdir(parents=True)

    check_transcript(MESSAGES / name, lambda asked: refuse(line, *shlex.split(asked[2:])))


_SENDING = (
    "tune squad --data {}",
    "train squad --data train.json --eval {}",
    "run --files {} -- hostname",
    "predict Who? --context {}",
    "predict --data {} --output out.csv",
)

_HINT = "  → save its content to a regular file and use that instead"


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
            f.expect_refusal(line, command.format(file).split(), f"{path}: is a {kind}\n{_HINT}")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("command", [_SENDING[1], *_SENDING[-2:]])
def test_a_file_of_any_size_takes_no_memory(line: CommandLine, command: str) -> None:
    shutil.copy(SAMPLE, "train.json")
    limit = "64.0 MiB" if "--context" in command else "2.0 GiB"
    with Path("huge").open("wb") as file:
        file.truncate(200 << 30)  # of holes
    message = f"huge: file is too large: 200.0 GiB, limit {limit}"
    f.expect_refusal(line, command.format("huge").split(), message)


@pytest.mark.parametrize("command", ["train squad --model m", "predict Who? --context A --model m"])
def test_a_model_consists_of_regular_files(line: CommandLine, command: str) -> None:
    Path("m").mkdir()
    Path("m/config.json").write_text('{"architectures": ["BertForQuestionAnswering"]}')
    os.mkfifo("m/tokenizer.json")
    f.expect_refusal(line, command.split(), f"m/tokenizer.json: is a pipe\n{_HINT}")
