"""The server's routes: health, metrics, predictions, and the APIs of OpenAI's and Cohere's clients."""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import math
import signal
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from jobs.serve import TOKENS
from jobs.serve.worker import FullError, LostError, Model, UnloadableError, Worker
from jobs.train.generation import PARSERS, read_settings
from jobs.worker.corpus.writers import finite
from jobs.worker.data.records import show

MOST_BYTES, MOST_ROWS, MOST_NEW_TOKENS = 8 << 20, 2048, 4096
"""Of a request."""
BODY_SECONDS = 30.0
"""How long a client may take to send a request."""
_STEPS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

Json = dict[str, Any]


class App:
    """The server's state and routes. ``name`` is what the APIs call the model."""

    def __init__(self, worker: Callable[[], Worker], name: str, token: str | None = None) -> None:
        self._make, self._name, self._token = worker, name, token
        self.failure = ""
        """Why the model can't be loaded, which ends the server."""
        self._worker: Worker | None = None
        self._requests: Counter[tuple[str, int]] = Counter()
        self._seconds: Counter[float] = Counter()
        self._total, self._rows = 0.0, 0

    def build(self) -> Starlette:
        """Return the application."""
        posts = {
            "/predict": self._predict,
            "/v1/embeddings": self._embed,
            **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), self._rerank),
        }
        return Starlette(
            routes=[
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                Route("/v1/models", self._models),
                *(Route(path, self._post(each), methods=["POST"]) for path, each in posts.items()),
            ],
            exception_handlers={HTTPException: _explain, Exception: _explain},
            lifespan=self._run,
        )

    @asynccontextmanager
    async def _run(self, _: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(self._work())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _work(self) -> None:
        try:
            self._worker = self._make()
            await self._worker.work()
        except (UnloadableError, OSError) as error:  # OSError: no memory for the first process
            self.failure = str(error)
            signal.raise_signal(signal.SIGINT)

    @property
    def _model(self) -> Model | None:
        return self._worker.model if self._worker else None

    def _post(self, answer: Callable[[Model, Json], Awaitable[Any]]) -> Any:
        async def handle(request: Request) -> Response:
            begin, code = time.monotonic(), 500
            try:
                self._authorize(request)
                content = await _read_json(request)
                if self._model is None:
                    raise HTTPException(503, "the model is loading", {"Retry-After": "5"})
                found = _to_json(await _unless_left(request, answer(self._model, content)))
                code = 200
                return found
            except HTTPException as error:
                code = error.status_code
                raise
            finally:
                self._count(request.scope["path"], code, time.monotonic() - begin)

        return handle

    def _count(self, path: str, code: int, seconds: float) -> None:
        self._requests[path, code] += 1
        self._total += seconds
        self._seconds.update(step for step in _STEPS if seconds <= step)

    def _authorize(self, request: Request) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._token and not hmac.compare_digest(given.encode(), self._token.encode()):
            raise HTTPException(401, "wrong or missing token: Authorization: Bearer TOKEN")

    async def _ask(self, rows: list[Mapping[str, Any]], settings: Json) -> list[Json]:
        """Return the predictions. Raises ``HTTPException`` for the first row that can't be used."""
        if not rows or len(rows) > MOST_ROWS:
            raise HTTPException(400, f"expected 1 to {MOST_ROWS} rows, not {len(rows)}")
        assert self._worker
        try:
            found = await self._worker.ask(rows, settings)
        except FullError:
            raise HTTPException(429, "too many rows are waiting", {"Retry-After": "1"}) from None
        except LostError:
            raise HTTPException(503, "the model is starting again", {"Retry-After": "5"}) from None
        for each in found:
            if isinstance(each, str):
                raise HTTPException(400, each)
        self._rows += len(found)
        return [each for each in found if isinstance(each, dict)]

    async def _health(self, _: Request) -> Response:
        if self._model is None:
            return JSONResponse({"status": "loading"}, 503, {"Retry-After": "5"})
        return JSONResponse({"status": "ok", "model": self._name, "task": self._model.task})

    async def _models(self, request: Request) -> Response:
        self._authorize(request)
        data = [{"id": self._name, "object": "model", "owned_by": "spr-cluster"}]
        return JSONResponse({"object": "list", "data": data})

    async def _metrics(self, request: Request) -> Response:
        self._authorize(request)
        worker, count = self._worker, sum(self._requests.values())
        lines = ["# TYPE spr_requests_total counter"]
        lines += [
            f'spr_requests_total{{path="{path}",code="{code}"}} {number}'
            for (path, code), number in sorted(self._requests.items())
        ]
        lines += ["# TYPE spr_request_seconds histogram"]
        lines += [f'spr_request_seconds_bucket{{le="{s}"}} {self._seconds[s]}' for s in _STEPS]
        lines += [
            f'spr_request_seconds_bucket{{le="+Inf"}} {count}',
            f"spr_request_seconds_sum {self._total:.6f}",
            f"spr_request_seconds_count {count}",
            "# TYPE spr_rows_total counter",
            f"spr_rows_total {self._rows}",
            "# TYPE spr_rows_waiting gauge",
            f"spr_rows_waiting {worker.waiting if worker else 0}",
            "# TYPE spr_model_restarts_total counter",
            f"spr_model_restarts_total {worker.restarts if worker else 0}",
        ]
        return PlainTextResponse("\n".join(lines) + "\n")

    async def _predict(self, model: Model, content: Json) -> Json:
        rows = content.get("rows")
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            example = json.dumps({"rows": [dict.fromkeys(model.inputs, "…")]}, ensure_ascii=False)
            raise HTTPException(400, f"expected {example}")
        found = await self._ask(rows, _read_settings(model, content))
        return {"predictions": [{n: each[n] for n in each if n != TOKENS} for each in found]}

    async def _embed(self, model: Model, content: Json) -> Json:
        """https://platform.openai.com/docs/api-reference/embeddings/create"""
        _require(model, "embed")
        given, form = content.get("input"), content.get("encoding_format") or "float"
        texts = [given] if isinstance(given, str) else given
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise HTTPException(400, "input: expected a text, or a list of texts")
        if form not in ("float", "base64"):
            raise HTTPException(400, "encoding_format: expected float or base64")
        found = await self._ask([{"text": text} for text in texts], {})
        vectors: list[Any] = [_cut(each["embedding"], content.get("dimensions")) for each in found]
        if form == "base64":
            packed = (struct.pack(f"<{len(each)}f", *each) for each in vectors)
            vectors = [base64.b64encode(each).decode() for each in packed]
        data = [
            {"object": "embedding", "index": place, "embedding": each}
            for place, each in enumerate(vectors)
        ]
        tokens = sum(each[TOKENS] for each in found)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "model": self._name, "data": data, "usage": usage}

    async def _rerank(self, model: Model, content: Json) -> Json:
        """https://docs.cohere.com/reference/rerank"""
        _require(model, "score")
        query, documents = content.get("query"), content.get("documents")
        texts = [
            each.get("text") if isinstance(each, dict) else each
            for each in (documents if isinstance(documents, list) else [None])
        ]
        if not all(isinstance(text, str) for text in (query, *texts)):
            raise HTTPException(400, "expected a query, and documents: a list of texts")
        most = content.get("top_n")
        if most is not None and (type(most) is not int or most < 1):
            raise HTTPException(400, f"top_n: expected a whole number from 1 up, not {most!r}")
        found = await self._ask([{"text": query, "pair": text} for text in texts], {})
        scores = [each["score"] for each in found]
        best = sorted(range(len(scores)), key=lambda place: -scores[place])[:most]
        shown = bool(content.get("return_documents"))
        results = [
            {
                "index": place,
                "relevance_score": _relevance(scores[place]) if model.is_ranking else scores[place],
                **({"document": {"text": texts[place]}} if shown else {}),
            }
            for place in best
        ]
        return {"model": self._name, "results": results}


def _read_settings(model: Model, content: Json) -> Json:
    """Return what a request has beside its rows. Raises ``HTTPException``."""
    known = [name for name in PARSERS if name in model.settings]
    given = {name: value for name, value in content.items() if name != "rows"}
    if unknown := [show(name) for name in given if name not in known]:
        names = ", ".join(("rows", *known))
        raise HTTPException(400, f"{unknown[0]}: a request to this model can have {names}")
    try:
        found = read_settings(given)
        if found.get("max_new_tokens", 0) > MOST_NEW_TOKENS:
            raise ValueError(f"max_new_tokens: expected at most {MOST_NEW_TOKENS}")
        return found
    except ValueError as error:
        raise HTTPException(400, str(error)) from None


def _require(model: Model, task: str) -> None:
    if model.task != task:
        raise HTTPException(
            404, f"this is a model of `train {model.task}`, not `{task}`: use /predict"
        )


def _relevance(score: float) -> float:
    """Return the sigmoid of a score, which clients expect: 0 to 1."""
    return (1 + math.tanh(score / 2)) / 2


def _cut(vector: list[float], size: Any) -> list[float]:
    """Return the first numbers of a vector, with length 1. Raises ``HTTPException``."""
    if size is None:
        return vector
    if type(size) is not int or not 1 <= size <= len(vector):
        raise HTTPException(400, f"dimensions: expected 1 to {len(vector)}, not {size!r}")
    length = math.hypot(*vector[:size]) or 1.0
    return [each / length for each in vector[:size]]


async def _unless_left(request: Request, answer: Awaitable[Any]) -> Any:
    """Return the answer. Raises ``HTTPException`` and cancels it if the client leaves before."""
    computing, leaving = (asyncio.ensure_future(each) for each in (answer, request.receive()))
    try:
        await asyncio.wait((computing, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not computing.done():
            raise HTTPException(499, "the client has left")
        return computing.result()
    finally:
        computing.cancel()
        leaving.cancel()


async def _read(request: Request) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MOST_BYTES:
            raise HTTPException(413, f"more than {MOST_BYTES >> 20} MiB")
    return bytes(body)


async def _read_json(request: Request) -> Json:
    try:
        body = await asyncio.wait_for(_read(request), BODY_SECONDS)
    except asyncio.TimeoutError:
        raise HTTPException(408, f"the request took more than {BODY_SECONDS:g} s") from None
    except ClientDisconnect:
        raise HTTPException(499, "the client has left") from None
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        raise HTTPException(400, "the body is not JSON") from None
    if not isinstance(found, dict):
        example = ': {"rows": [{…}]}' if request.scope["path"] == "/predict" else ""
        raise HTTPException(400, f"expected a JSON object{example}")
    return found


def _to_json(content: Json) -> Response:
    try:
        return JSONResponse(content)
    except ValueError:  # a model that has diverged gives NaN
        return JSONResponse(finite(content))


async def _explain(_: Request, error: Exception) -> Response:
    """Return an error in the form that OpenAI's clients know."""
    if not isinstance(error, HTTPException):
        error = HTTPException(500, "internal error, see the log of the server")
    content = {"error": {"message": error.detail, "code": error.status_code}}
    return JSONResponse(content, error.status_code, error.headers)
