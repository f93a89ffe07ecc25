"""``spr-cluster serve``."""

from __future__ import annotations

import importlib.util
import ipaddress
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cluster.console.options import Request, argument, option, positive_int
from cluster.console.output import say
from cluster.console.parser import Parser, add_request
from infra.errors import JobError, MissingExtraError, UsageError
from infra.files import read_text
from jobs.train.predict import can_answer_here, check_model, find_model, silence_libraries
from jobs.train.request import expand_home

_PACKAGES = ("starlette", "uvicorn")
_STOP_SECONDS, _MOST_HEADERS = 30, 64 << 10


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise ValueError(f"{text!r}: expected a number from 0 to 65535")
    return int(text)


@dataclass(frozen=True, kw_only=True)
class ServeRequest(Request):
    """Serve a trained model over HTTP on this machine, for trying it and for use inside a network: there
    are no users or limits per client. Requests that arrive together share a batch. A model that
    `train --export` wrote for OpenVINO is used in that form. /predict takes rows, /v1/embeddings and
    /v1/rerank what the clients of OpenAI and Cohere send, /health and /metrics tell its state.
    For a language model, /predict also takes max_new_tokens (at most 4096),
    temperature, top_p, and seed.

    examples:
      spr-cluster serve                               the newest in ./results
      spr-cluster serve classify-20261124-142501-k3f --port 9000
      spr-cluster serve ./model --host 0.0.0.0 --token-file token
      curl localhost:8000/predict -d '{"rows": [{"text": "an excellent read"}]}'
    """

    model: str | None = argument(
        "model or results folder, or job below ./results (default: the newest there)",
        None,
        metavar="DIR|JOB",
    )
    host: str = option(
        "address to listen on", "127.0.0.1", parse=lambda text: text.strip("[]"), metavar="ADDRESS"
    )
    port: int = option("port to listen on; 0: any", 8000, parse=_port, metavar="N")
    token_file: str | None = option(
        "file with the token that clients must send; any address but this machine's own needs one",
        metavar="FILE",
    )
    threads: int | None = option(
        "cores for the model (default: all)", parse=positive_int, metavar="N"
    )


def add_parser(parent: Parser) -> None:
    add_request(parent, "serve", run, ServeRequest)


def run(request: ServeRequest) -> int:
    token = _read_token(request)
    _require_packages()
    with _listen(request) as listener:
        model = require_model(request.model)
        silence_libraries(model)
        serve(model, listener, token, request.threads)
    return 0


def require_model(name: str | None) -> Path:
    """Return the folder of a model on this machine. Raises :class:`UsageError`."""
    model = find_model(name, say, option="")
    if model is None:
        missing = f"results/{name}: no such folder" if name else "no model in results/"
        raise UsageError(missing, hint="`spr-cluster fetch JOB` brings a job's model here")
    check_model(model)
    return model


def model_name(model: Path) -> str:
    """Return a model's name for clients: that of its results, such as ``squad-20260731-142501-k3f``."""
    folder = model.absolute()
    return (folder.parent.name if folder.name == "model" else "") or folder.name


def serve(model: Path, listener: socket.socket, token: str | None, threads: int | None) -> None:
    """Serve until SIGTERM or Ctrl-C; requests that have begun are answered.

    Raises :class:`JobError` if the model can't be loaded.
    """
    import uvicorn  # noqa: PLC0415 - an optional package

    from jobs.serve.app import App  # noqa: PLC0415
    from jobs.serve.worker import Worker  # noqa: PLC0415

    name = model_name(model)
    app = App(lambda: Worker(model, threads), name, token)
    config = uvicorn.Config(
        app.build(),
        log_level="warning",
        timeout_keep_alive=75,  # longer than a load balancer's: 60 s (AWS)
        timeout_graceful_shutdown=_STOP_SECONDS,
        h11_max_incomplete_event_size=_MOST_HEADERS,
    )
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    say(f"{name}: http://{shown}:{port} (Ctrl-C stops it)")
    with suppress(KeyboardInterrupt):  # it raises the signal again that has ended it
        uvicorn.Server(config).run(sockets=[listener])
    if app.failure:
        raise JobError(f"model {model} can't be loaded: {app.failure}")
    say("stopped")


def _read_token(request: ServeRequest) -> str | None:
    if request.token_file is None:
        if not _is_loopback(request.host):
            raise UsageError(
                f"--host {request.host} needs --token-file: others could use the model",
                hint="head -c 24 /dev/urandom | base64 > token",
            )
        return None
    path = expand_home(request.token_file)
    token = read_text(path).strip()
    if not token or len(token.split()) > 1 or not token.isascii():
        raise UsageError(f"--token-file {path}: expected one word")
    if path.stat().st_mode & 0o077:
        say(f"warning: other users of this machine can read {path}: chmod 600 {path}")
    return token


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _require_packages() -> None:
    if not can_answer_here():
        raise MissingExtraError("`serve` needs PyTorch and transformers on this machine", "job")
    if missing := [name for name in _PACKAGES if importlib.util.find_spec(name) is None]:
        raise MissingExtraError(f"`serve` needs {missing[0]}", "serve")


def _listen(request: ServeRequest) -> socket.socket:
    """Return a socket that listens: a port in use is an error before the model is loaded."""
    family = socket.AF_INET6 if ":" in request.host else socket.AF_INET
    try:
        return socket.create_server((request.host, request.port), family=family, backlog=512)
    except OSError as error:
        why = error.strerror or error
        raise UsageError(f"can't listen on {request.host}:{request.port}: {why}") from None
