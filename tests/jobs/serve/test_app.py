"""The server's routes, with a model that is only played."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from starlette.datastructures import URL
from starlette.testclient import TestClient

from jobs.cli.results.serve import serve
from jobs.serve import Answer
from jobs.serve import app as routes
from jobs.serve.app import App
from jobs.serve.worker import FullError, LostError, Model
from jobs.train.generation import PARSERS


class Played:
    """A model whose predictions a function makes; ``error`` is raised instead."""

    waiting, restarts = 3, 2

    def __init__(self, task: str, answer: Callable[[Mapping[str, Any]], Answer]) -> None:
        self.answer = answer
        self.model: Model | None = Model(task, ("text",))
        self.error: Exception | None = None
        self.asked: list[Sequence[Mapping[str, Any]]] = []

    async def work(self) -> None:
        await asyncio.sleep(3600)

    async def ask(
        self, rows: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]
    ) -> list[Answer]:
        if self.error:
            raise self.error
        self.settings = settings
        self.asked.append(rows)
        return [self.answer(row) for row in rows]


@contextmanager
def serving(model: Played, token: str | None = None) -> Iterator[TestClient]:
    made: Any = lambda: model  # noqa: E731
    with TestClient(App(made, "mine", token).build(), raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def classifier() -> Iterator[tuple[TestClient, Played]]:
    answers = {"nan": {"labels": {"a": math.nan}}}
    usual = {"labels": {"a": 1}}
    model = Played("classify", lambda row: answers.get(row["text"], usual) if row else "no text")
    with serving(model) as client:
        yield client, model


def test_rows_are_predicted(classifier: tuple[TestClient, Played]) -> None:
    client, model = classifier
    answer = client.post("/predict", json={"rows": [{"text": "one"}, {"text": "two"}]})
    assert answer.json() == {"predictions": [{"labels": {"a": 1}}] * 2}
    assert model.asked == [[{"text": "one"}, {"text": "two"}]]
    answer = client.post("/predict", json={"rows": [{"text": "nan"}]})
    assert answer.json() == {"predictions": [{"labels": {"a": None}}]}, "JSON has no NaN"
    assert client.get("/health").json() == {"status": "ok", "model": "mine", "task": "classify"}


@pytest.mark.parametrize(
    ("content", "code", "message"),
    [
        (b"{", 400, "the body is not JSON"),
        (b"[" * 100_000, 400, "the body is not JSON"),
        (b"[]", 400, 'expected a JSON object: {"rows": [{…}]}'),
        (b"{}", 400, 'expected {"rows": [{"text": "…"}]}'),
        (b'{"rows": [1]}', 400, 'expected {"rows": [{"text": "…"}]}'),
        (b'{"rows": []}', 400, "expected 1 to 2048 rows, not 0"),
        (b'{"rows": [{"text": "a"}, {}]}', 400, "no text"),
        (b'{"rows": [{}], "seed": 1}', 400, "'seed': a request to this model can have rows"),
        (b'{"rows": "' + b"x" * (9 << 20) + b'"}', 413, "more than 8 MiB"),
    ],
)
def test_what_can_not_be_used_is_said(
    classifier: tuple[TestClient, Played], content: bytes, code: int, message: str
) -> None:
    answer = classifier[0].post("/predict", content=content)
    assert answer.json() == {"error": {"message": message, "code": code}}
    assert answer.status_code == code


ALL = "max_new_tokens, temperature, top_p, seed"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_tokens": 5}, f"'max_tokens': a request to this model can have rows, {ALL}"),
        ({"perplexity": True}, f"'perplexity': a request to this model can have rows, {ALL}"),
        ({"max_new_tokens": 1.5}, "max_new_tokens: '1.5': expected a whole number of at least 1"),
        ({"max_new_tokens": 4097}, "max_new_tokens: expected at most 4096"),
        ({"temperature": True}, "temperature: expected a number"),
        ({"seed": 0}, "seed: has no effect without temperature"),
    ],
)
def test_a_request_to_a_language_model_can_have_settings(
    given: dict[str, Any], message: str
) -> None:
    model = Played("lm", lambda _: {"completion": "a"})
    model.model = Model("lm", ("text",), settings=(*reversed([*PARSERS]), "perplexity"))
    good = {"max_new_tokens": 5, "temperature": 0.5, "top_p": 1, "seed": 0}
    with serving(model) as client:
        for more, settings in ((good, good), ({"max_new_tokens": None}, {})):
            assert client.post("/predict", json={"rows": [{"text": "a"}], **more}).is_success
            assert model.settings == settings
        answer = client.post("/predict", json={"rows": [{"text": "a"}], **given})
    assert answer.json() == {"error": {"message": message, "code": 400}}


def test_a_full_queue_and_a_lost_model_are_temporary_and_a_defect_is_an_error_as_others(
    classifier: tuple[TestClient, Played],
) -> None:
    client, model = classifier
    for error, code in ((FullError(), 429), (LostError(), 503), (RuntimeError("secret"), 500)):
        model.error = error
        answer = client.post("/predict", json={"rows": [{"text": "one"}]})
        assert answer.status_code == code
        assert int(answer.headers.get("retry-after", 0)) in ((0,) if code == 500 else (1, 5))
    message = "internal error, see the log of the server"
    assert answer.json() == {"error": {"message": message, "code": 500}}


def test_a_model_that_is_loading_is_not_ready() -> None:
    model = Played("classify", lambda _: {})
    loaded, model.model = model.model, None
    with serving(model) as client:
        for _ in range(2):
            assert client.get("/health").status_code == 503
            answer = client.post("/predict", json={"rows": [{"text": "one"}]})
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
            model.model = loaded
            assert client.get("/health").status_code == 200
            model.model = None  # its process has ended


def test_a_slow_client_does_not_hold_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(_: Any) -> bytes:
        await asyncio.sleep(3600)
        return b""

    monkeypatch.setattr(routes, "_read", never)
    monkeypatch.setattr(routes, "BODY_SECONDS", 0.05)
    with serving(Played("classify", lambda _: {})) as client:
        assert client.post("/predict", content=b"{}").status_code == 408


def test_a_token_is_required_everywhere_but_for_the_health() -> None:
    model = Played("classify", lambda _: {"labels": {}})
    with serving(model, "secret") as client:
        for given in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer sécret"}):
            sent = {name.encode(): value.encode() for name, value in given.items()}
            assert client.post("/predict", json={"rows": [{}]}, headers=sent).status_code == 401
            assert client.get("/metrics", headers=sent).status_code == 401
            assert client.get("/v1/models", headers=sent).status_code == 401
        assert model.asked == []
        right = {"Authorization": "Bearer secret"}
        assert client.post("/predict", json={"rows": [{}]}, headers=right).status_code == 200
        assert client.get("/v1/models", headers=right).json()["data"][0]["id"] == "mine"


def test_documents_are_ranked() -> None:
    model = Played("score", lambda row: {"score": float(len(row["pair"]))})
    with serving(model) as client:
        asked = {"query": "q", "documents": ["a", {"text": "ccc"}, "bb"], "top_n": 2}
        found = client.post("/v1/rerank", json={**asked, "return_documents": True}).json()
        assert found["results"] == [
            {"index": 1, "relevance_score": 3.0, "document": {"text": "ccc"}},
            {"index": 2, "relevance_score": 2.0, "document": {"text": "bb"}},
        ]
        assert [each["text"] for each in model.asked[0]] == ["q"] * 3
        nothing = {"top_n": None, "return_documents": None}
        every = client.post("/v1/rerank", json={**asked, **nothing}).json()
        assert [each["index"] for each in every["results"]] == [1, 2, 0]
        model.model = Model("score", ("text",), is_ranking=True)
        for path in ("/v2/rerank", "/rerank"):
            results = client.post(path, json={**asked, **nothing}).json()["results"]
            sigmoids = [1 / (1 + math.exp(-score)) for score in (3, 2, 1)]
            assert [each["relevance_score"] for each in results] == pytest.approx(sigmoids)
        wrong_counts = [{**asked, "top_n": count} for count in ("two", 0, -1, True, 1.5)]
        for bad in ({"query": "q"}, {"documents": ["a"]}, *wrong_counts):
            assert client.post("/v1/rerank", json=bad).status_code == 400
        wrong = client.post("/v1/embeddings", json={"input": "a"})
        assert wrong.status_code == 404
        assert "train score" in wrong.json()["error"]["message"]


def test_vectors_are_cut_and_their_tokens_counted() -> None:
    model = Played("embed", lambda _: {"embedding": [0.6, 0.0, 0.8], "prompt_tokens": 4})
    with serving(model) as client:
        nothing = dict.fromkeys(("encoding_format", "user"))  # as LiteLLM sends them
        asked = {"input": ["a", "b"], "dimensions": 2, **nothing}
        found = client.post("/v1/embeddings", json=asked).json()
        assert [each["embedding"] for each in found["data"]] == [[1.0, 0.0]] * 2
        assert found["usage"] == {"prompt_tokens": 8, "total_tokens": 8}
        for size in (0, 4, "2", True):
            answer = client.post("/v1/embeddings", json={**asked, "dimensions": size})
            assert answer.status_code == 400
            assert f"dimensions: expected 1 to 3, not {size!r}" in answer.text
        plain = client.post("/predict", json={"rows": [{"text": "a"}]}).json()
        assert plain == {"predictions": [{"embedding": [0.6, 0.0, 0.8]}]}


def test_the_name_of_the_results_and_an_ipv6_address_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("uvicorn.Server.run", Mock())
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    names = {"/model": "model", "/r/squad-1/model": "squad-1", "/m/mini": "mini", "model": "here"}
    for folder, name in names.items():
        serve(Path(folder), Mock(getsockname=lambda: ("::1", 8000, 0, 0)), None, None)
        assert capsys.readouterr().err.startswith(f"{name}: http://[::1]:8000 (")


def test_the_metrics_count_requests_rows_and_times(
    classifier: tuple[TestClient, Played], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, model = classifier
    # Older versions take the host from the client's header as it is.
    monkeypatch.setattr("starlette.requests.Request.url", URL('http://host/"} 9/predict'))
    client.post("/predict", json={"rows": [{"text": "one"}, {"text": "two"}]})
    client.post("/predict", content=b"{")
    model.error = RuntimeError("a bug")
    client.post("/predict", json={"rows": [{"text": "one"}]})
    lines = client.get("/metrics").text.splitlines()
    for line in (
        'spr_requests_total{path="/predict",code="200"} 1',
        'spr_requests_total{path="/predict",code="400"} 1',
        'spr_requests_total{path="/predict",code="500"} 1',
        'spr_request_seconds_bucket{le="+Inf"} 3',
        "spr_request_seconds_count 3",
        "spr_rows_total 2",
        "spr_rows_waiting 3",
        "spr_model_restarts_total 2",
    ):
        assert line in lines
