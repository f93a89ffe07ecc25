"""A minimal Kubernetes API on loopback that can be made to misbehave.

It has no schemas, no scheduler, no operator. Tests put in what those would write.
"""

from __future__ import annotations

import base64
import hashlib
import json
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

Manifest = dict[str, Any]
TRAINER, OPERATOR = "/apis/trainer.kubeflow.org/v1alpha1", "/apis/kubeflow.org/v1"
ACCESS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


class Answer(NamedTuple):
    code: int
    body: Manifest


def status(code: int, message: str) -> Answer:
    return Answer(code, {"kind": "Status", "code": code, "message": message})


class KubernetesServer:
    """Objects by path, and the faults that tests ask for."""

    def __init__(self) -> None:
        self.objects: dict[str, Manifest] = {}
        self.served = {TRAINER: ["trainjobs"], OPERATOR: ["pytorchjobs"]}
        self.denied: set[tuple[str, str]] = set()
        """Verbs and resources, such as ``("create", "pytorchjobs")``."""
        self.fail: Callable[[str, str], Answer | None] = lambda method, path: None
        self.on_create: Callable[[str, Manifest], None] = lambda path, found: None
        self.logs: dict[str, list[str]] = {}
        self.previous: dict[str, list[str]] = {}
        """Of the containers' runs before the current ones."""
        self.breaks: list[int] = []
        """After how many lines each of the next log streams breaks off."""
        self.short = 0
        """How many of the next log streams end at what there is."""
        self.exec_breaks: list[int] = []
        """After how many bytes each of the next commands' output breaks off."""
        self.volume = Path("/nonexistent")
        """What pods see as /workspace."""
        self.requests: list[tuple[str, str]] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        self.put("/api/v1/namespaces/ml", {})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def put(self, path: str, content: Manifest) -> Manifest:
        """Keep an object, as its path names it."""
        meta = {
            "name": path.rsplit("/", 1)[1],
            "uid": path,
            "creationTimestamp": "2026-11-22T14:25:01Z",
        }
        found = {**content, "metadata": {**meta, **content.get("metadata", {})}}
        self.objects[path] = found
        return found

    def pod(
        self, job: str, index: int, phase: str, *, kind: str = "PyTorchJob", **state: Any
    ) -> str:
        """Keep a pod as an operator makes it; return its path."""
        role = "worker" if index else "master"
        name = f"{job}-{role}-{max(0, index - 1)}"
        labels = {
            "training.kubeflow.org/job-name": job,
            "training.kubeflow.org/replica-type": role,
            "training.kubeflow.org/replica-index": str(max(0, index - 1)),
        }
        if kind == "TrainJob":
            name = f"{job}-node-0-{index}"
            labels = {
                "jobset.sigs.k8s.io/jobset-name": job,
                "jobset.sigs.k8s.io/replicatedjob-name": "node",
                "batch.kubernetes.io/job-completion-index": str(index),
            }
        path = f"/api/v1/namespaces/ml/pods/{name}"
        containers = [{"name": "istio-proxy"}, {"name": "pytorch" if role in name else "node"}]
        volumes = [{"persistentVolumeClaim": {"claimName": "spr-cluster"}}]
        spec = {"nodeName": f"worker{index}", "containers": containers, "volumes": volumes}
        content = {"spec": spec, "status": {"phase": phase, **state}}
        self.put(path, {"metadata": {"labels": labels}, **content})
        return path

    def answer(self, method: str, path: str, query: dict[str, str], body: Manifest) -> Answer:
        self.requests.append((method, path))
        if fault := self.fail(method, path):
            return fault
        if path == ACCESS:
            return self._review(body)
        if path in self.served:
            return Answer(200, {"resources": [{"name": name} for name in self.served[path]]})
        if path.startswith("/apis/") and not self._has_group(path):
            return status(404, "the server could not find the requested resource")
        # A path names a type, and perhaps one of it, below its group and perhaps its namespace.
        words = path.split("/")[2 if path.startswith("/api/") else 3 :][1:]
        if words[0] == "namespaces" and len(words) > 2:
            words = words[2:]
        is_list = len(words) == 1
        return self._act(method, path, query, body, is_list=is_list)

    def _has_group(self, path: str) -> bool:
        return path.startswith((*self.served, "/apis/storage.k8s.io/v1"))

    def _act(
        self, method: str, path: str, query: dict[str, str], body: Manifest, *, is_list: bool
    ) -> Answer:
        plural = path.split("/")[-1 if is_list else -2]
        verb = {"POST": "create", "DELETE": "delete"}.get(method, "list" if is_list else "get")
        if (verb, plural) in self.denied:
            return status(
                403,
                f'{plural} is forbidden: User "ada" cannot {verb} resource "{plural}" in the namespace "ml"',
            )
        if method == "POST":
            return self._create(path, query, body)
        if is_list:
            return Answer(200, {"items": self._select(path, query.get("labelSelector", ""))})
        if path not in self.objects:
            return status(404, f'{plural} "{path.rsplit("/", 1)[1]}" not found')
        found = self.objects[path]
        if method == "DELETE":
            self._delete(path, found)
        return Answer(200, found)

    def _create(self, path: str, query: dict[str, str], body: Manifest) -> Answer:
        own = f"{path}/{body['metadata']['name']}"
        if own in self.objects:
            return status(
                409, f'{own.rsplit("/", 2)[1]} "{body["metadata"]["name"]}" already exists'
            )
        if query.get("dryRun") == "All":
            return Answer(201, body)
        self.put(own, body)
        self.on_create(own, body)
        return Answer(201, body)

    def _delete(self, path: str, found: Manifest) -> None:
        del self.objects[path]
        for other, each in [*self.objects.items()]:
            labels = each["metadata"].get("labels", {})
            if found["metadata"]["name"] in labels.values() and "/pods/" in other:
                del self.objects[other]

    def _select(self, path: str, selector: str) -> list[Manifest]:
        key, _, value = selector.partition("=")
        found = [each for own, each in self.objects.items() if own.rsplit("/", 1)[0] == path]
        labels = [each["metadata"].get("labels", {}) for each in found]
        return [
            each
            for each, own in zip(found, labels, strict=True)
            if not key or (key in own and value in ("", own[key]))
        ]

    def _review(self, body: Manifest) -> Answer:
        asked = body["spec"]["resourceAttributes"]
        what = "/".join(filter(None, (asked["resource"], asked["subresource"])))
        allowed = (asked["verb"], what) not in self.denied
        return Answer(201, {"status": {"allowed": allowed}})

    def log_lines(self, pod: str, query: dict[str, str]) -> Iterator[bytes]:
        """Yield a pod's log as kubelet does, until it breaks off (``ConnectionError``) or ends."""
        left = self.breaks.pop(0) if self.breaks else None
        since, sent = query.get("sinceTime", "")[:19], 0
        request = ("LOG", f"{pod}?{query.get('sinceTime', '')}")
        read = False
        while True:
            ended = self.objects[pod]["status"]["phase"] in ("Succeeded", "Failed")
            logs = self.previous if "previous" in query else self.logs
            lines = [line for line in logs[pod] if line[:19] >= since]
            if not read:  # a test that waits for the request may replace the pod next
                self.requests.append(request)
                read = True
            for line in lines[sent:]:
                if left is not None and sent >= left:
                    yield line.encode()[: len(line) // 2]
                    raise ConnectionError
                sent += 1
                yield line.encode() + b"\n"
            if query.get("follow") != "true" or ended or self.short:
                self.short = max(0, self.short - 1)
                return
            time.sleep(0.01)

    def run(self, command: list[str]) -> subprocess.CompletedProcess[bytes]:
        """Run what a pod would run, with the volume where the pod has its claim."""
        words = [word.replace("/workspace", str(self.volume)) for word in command]
        return subprocess.run(words, capture_output=True, check=False)


def _handler(server: KubernetesServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *args: Any) -> None:
            return

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            words = parse_qs(url.query)
            query = {key: values[0] for key, values in words.items()}
            pod, _, part = url.path.rpartition("/")
            if part == "exec":
                assert words["container"] == ["reader"]
                self._exec(words["command"])
            elif part == "log" and pod in server.objects:
                fault = server.fail("GET", url.path)
                self._answer(fault) if fault else self._log(pod, query)
            else:
                self._answer(server.answer("GET", url.path, query, {}))

        def do_POST(self) -> None:
            url = urlsplit(self.path)
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            query = {key: values[0] for key, values in parse_qs(url.query).items()}
            self._answer(server.answer(self.command, url.path, query, json.loads(body or b"{}")))

        do_DELETE = do_POST  # noqa: N815

        def _answer(self, answer: Answer) -> None:
            content = json.dumps(answer.body).encode()
            self.send_response(answer.code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def _log(self, pod: str, query: dict[str, str]) -> None:
            if query.get("container") not in ("pytorch", "node"):
                return self._answer(status(400, "a container name must be specified"))
            if "previous" in query and pod not in server.previous:
                return self._answer(status(400, "previous terminated container not found"))
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            try:
                for line in server.log_lines(pod, query):
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
                    self.wfile.flush()
                self.wfile.write(b"0\r\n\r\n")
            except ConnectionError:
                self.close_connection = True

        def _exec(self, command: list[str]) -> None:
            key = f"{self.headers['Sec-WebSocket-Key']}{_GUID}".encode()
            accept = base64.b64encode(hashlib.sha1(key).digest()).decode()
            self.send_response(101)
            for name, value in (
                ("Upgrade", "websocket"),
                ("Connection", "Upgrade"),
                ("Sec-WebSocket-Accept", accept),
                ("Sec-WebSocket-Protocol", "v4.channel.k8s.io"),
            ):
                self.send_header(name, value)
            self.end_headers()
            self.close_connection = True
            done = server.run(command)
            output = done.stdout
            if server.exec_breaks:
                self._frame(1, output[: server.exec_breaks.pop(0)])
                return
            for start in range(0, len(output), 4096):
                self._frame(1, output[start : start + 4096])
            self._frame(2, done.stderr)
            failed = {"status": "Failure", "message": f"exit code {done.returncode}"}
            self._frame(
                3, json.dumps(failed if done.returncode else {"status": "Success"}).encode()
            )

        def _frame(self, channel: int, content: bytes) -> None:
            data = bytes([channel]) + content
            self.wfile.write(struct.pack("!BBH", 0x82, 126, len(data)) + data)
            self.wfile.flush()

    return Handler
