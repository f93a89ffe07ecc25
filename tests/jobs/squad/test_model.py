from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs.squad.dataset import Question, all_texts
from jobs.squad.distributed import Identity, Ranks
from jobs.squad.errors import BackendError, ModelError
from jobs.squad.model import load_model, train_tokenizer
from jobs.squad.options import DEMO
from jobs.squad.step import load_ipex

ALONE = Ranks(Identity(), "gloo", "", control=None)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.mark.parametrize("name", ["/no/such/folder", "./none", "~/none"])
def test_a_missing_folder_is_named(name: str) -> None:
    with pytest.raises(ModelError, match=f"model {name}: no such folder"):
        load_model(replace(DEMO, model=name), [], ALONE)


@pytest.mark.parametrize("name", ["no-such-organisation/no-such-model", "not a model name"])
def test_an_unknown_hub_model_is_one_line(name: str) -> None:
    with pytest.raises(ModelError, match=f"model {name} can't be loaded: ") as raised:
        load_model(replace(DEMO, model=name), [], ALONE)
    assert "\n" not in raised.value.message


def test_a_folder_without_a_model_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=f"model {tmp_path} can't be loaded: ") as raised:
        load_model(replace(DEMO, model=str(tmp_path)), [], ALONE)
    assert "\n" not in raised.value.message


def test_the_tokenizer_depends_on_nothing_but_the_texts(questions: list[Question]) -> None:
    first, second = (train_tokenizer(all_texts(questions)) for _ in range(2))
    assert first == second


def test_the_tokenizer_loses_nothing(questions: list[Question], tokenizer: Any) -> None:
    for text in all_texts(questions):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.unk_token_id not in ids
        assert "".join(tokenizer.decode(ids).split()) == "".join(text.lower().split())


def test_ipex_is_used_or_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "intel_extension_for_pytorch", None)
    with pytest.raises(BackendError, match="--ipex needs intel_extension_for_pytorch"):
        load_ipex()
