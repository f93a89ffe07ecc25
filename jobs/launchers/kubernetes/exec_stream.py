"""Output of a command in a pod, over a web socket.

The client's own ``WSClient`` keeps all output in memory, and copies it for each frame: a model is too large
for that.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from kubernetes.client import ApiClient
from kubernetes.stream.ws_client import (
    ERROR_CHANNEL,
    STDERR_CHANNEL,
    STDOUT_CHANNEL,
    V4_CHANNEL_PROTOCOL,
    create_websocket,
    get_websocket_url,
)
from websocket import ABNF, WebSocket, WebSocketException

from jobs.launchers.kubernetes.errors import KubernetesError

_SILENCE_S = 60.0


def run_in_pod(client: ApiClient, path: str, query: list[tuple[str, str]]) -> Iterator[bytes]:
    """Run a command, and yield what it prints. Raises :class:`KubernetesError` unless it succeeds."""
    headers: dict[str, str] = {}
    client.update_params_for_auth(headers, [], ["BearerToken"], path, "GET", None)
    headers["sec-websocket-protocol"] = V4_CHANNEL_PROTOCOL
    url = get_websocket_url(client.configuration.host + path, query)
    try:
        socket = create_websocket(client.configuration, url, headers)
    except (WebSocketException, OSError) as error:
        raise KubernetesError(f"no command can be run in the pod: {error}") from error
    socket.settimeout(_SILENCE_S)
    try:
        yield from _read_stdout(socket)
    except (WebSocketException, OSError, ValueError) as error:
        raise KubernetesError(f"the connection to the pod broke off: {error}") from error
    finally:
        socket.close()


def _read_stdout(socket: WebSocket) -> Iterator[bytes]:
    errors = b""
    while True:
        code, frame = socket.recv_data_frame(True)
        if code == ABNF.OPCODE_CLOSE:
            raise KubernetesError("the connection to the pod broke off")
        channel, data = frame.data[0:1], frame.data[1:]
        if channel == bytes([STDOUT_CHANNEL]) and data:
            yield data
        elif channel == bytes([STDERR_CHANNEL]):
            errors += data
        elif channel == bytes([ERROR_CHANNEL]):
            # It comes last, so all output has arrived.
            _require_success(json.loads(data), errors)
            return


def _require_success(status: dict[str, Any], errors: bytes) -> None:
    if status.get("status") != "Success":
        text = " ".join(errors.decode(errors="replace").split()) or str(status.get("message"))
        # A status makes it final: the command ran, and would fail again.
        raise KubernetesError(f"in the pod: {text}", status=int(status.get("code") or 500))
