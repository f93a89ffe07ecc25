from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from jobs.places.files import worker_files
from jobs.worker.tasks.squad.dataset import Question, all_texts, read_dataset
from jobs.worker.tasks.squad.task import SAMPLE


@pytest.fixture(scope="session")
def questions() -> list[Question]:
    return read_dataset(SAMPLE)


@pytest.fixture(scope="session")
def tokenizer(questions: list[Question]) -> Any:
    from jobs.worker.training.model import new_tokenizer, train_tokenizer

    return new_tokenizer(train_tokenizer(all_texts(questions)))


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """A job's folder on a node: the shipped code, and nothing else of the project."""
    for name, source in worker_files().items():
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
    return tmp_path


@pytest.fixture
def node_environ(node: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The variables of a process on that node, which finds the code as mpirun's ranks do."""
    monkeypatch.setenv("PYTHONPATH", str(node / "code"))
    return dict(os.environ)


@pytest.fixture
def nodes_folder(node: Path, node_environ: dict[str, str]) -> Path:
    """The job's folder with a part of the sample as ``data.json``."""
    write_part(node)
    return node


def write_part(folder: Path) -> None:
    document = json.loads(SAMPLE.read_text())
    document["data"] = document["data"][:1]
    (folder / "data.json").write_text(json.dumps(document))


@pytest.fixture
def compiled(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A place for compiled code that all processes of this run share: its headers alone take 6 s."""
    from torch._inductor import codecache

    root = tmp_path_factory.getbasetemp()
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "compiled"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    monkeypatch.setattr(codecache, "_HEADER_DIR", str(folder / "headers"))
    monkeypatch.setattr(codecache, "_HEADER_LOCK_DIR", str(folder / "headers/locks"))
    # Otherwise setuptools, which the compiler imports, may refuse distutils as another test left it.
    monkeypatch.setenv("SETUPTOOLS_USE_DISTUTILS", "stdlib")
