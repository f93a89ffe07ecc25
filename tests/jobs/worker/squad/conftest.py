from __future__ import annotations

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
