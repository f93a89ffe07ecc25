from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from jobs.worker.squad.dataset import Question, all_texts, read_dataset
from jobs.worker.squad.options import SAMPLE


@pytest.fixture(scope="session")
def questions() -> list[Question]:
    return read_dataset(SAMPLE)


@pytest.fixture(scope="session")
def tokenizer(questions: list[Question]) -> Any:
    from jobs.worker.squad.model import new_tokenizer, train_tokenizer

    return new_tokenizer(train_tokenizer(all_texts(questions)))


@pytest.fixture
def nodes_folder(tmp_path: Path) -> Path:
    """Holds the package as a node has it, and a part of the sample as ``data.json``."""
    source = SAMPLE.parent
    shutil.copytree(source, tmp_path / "squad", ignore=shutil.ignore_patterns("__pycache__"))
    document = json.loads(SAMPLE.read_text())
    document["data"] = document["data"][:1]
    (tmp_path / "data.json").write_text(json.dumps(document))
    return tmp_path
