from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from jobs.worker.squad.dataset import Question, all_texts, read_dataset
from jobs.worker.squad.options import SAMPLE
from tests.jobs.worker.squad.forked_ranks import end_server


@pytest.fixture(scope="session", autouse=True)
def _end_server() -> Iterator[None]:
    yield
    end_server()


@pytest.fixture(scope="session")
def questions() -> list[Question]:
    return read_dataset(SAMPLE)


@pytest.fixture(scope="session")
def tokenizer(questions: list[Question]) -> Any:
    from jobs.worker.squad.model import new_tokenizer, train_tokenizer

    return new_tokenizer(train_tokenizer(all_texts(questions)))
