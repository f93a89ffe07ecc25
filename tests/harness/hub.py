"""The hub's protocol, as its libraries use it: files and their metadata, Git LFS, and commits."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml

TOKEN = "hf_of_the_test"
_COMMIT = "0123456789abcdef0123456789abcdef0123456%d"
_JSON = {"Content-Type": "application/json"}


@dataclass
class Hub:
    """``team/…`` is private, ``gated/…`` needs :data:`TOKEN`, which has access, ``open/…`` neither.

    Only ``team`` can be written. Files with weights go through LFS, by their SHA-256.
    """

    url: str
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Content by repository and name; data sets begin with ``datasets/``."""
    private: dict[str, bool] = field(default_factory=dict)
    commits: list[tuple[str, str]] = field(default_factory=list)
    """Repositories, and the names of the changed files."""
    objects: dict[str, bytes] = field(default_factory=dict)
    uploads: list[str] = field(default_factory=list)

    def answer(
        self, method: str, path: str, token: str, body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        """Return the status, the headers, and the content that answer a request."""
        if method in ("GET", "HEAD"):
            return self._read(path, token)
        status, found = self._write(method, path, token, body)
        error = {"X-Error-Message": found["error"]} if "error" in found else {}
        return status, {**_JSON, **error}, json.dumps(found).encode()

    def _read(self, path: str, token: str) -> tuple[int, dict[str, str], bytes]:
        is_api = path.startswith("/api/")
        words = path.partition("?")[0].strip("/").removeprefix("api/").removeprefix("models/")
        parts = words.split("/")
        length = 3 if parts[0] == "datasets" else 2
        repo, rest = "/".join(parts[:length]), parts[length:]
        owner = repo.removeprefix("datasets/").partition("/")[0]
        if owner == "gated" and token != TOKEN:
            return (403 if token else 401), {"X-Error-Code": "GatedRepo"}, b""
        if repo not in self.files or (owner == "team" and token != TOKEN):
            return (404 if token else 401), {"X-Error-Code": "RepoNotFound"}, b""
        if is_api:
            return 200, _JSON, json.dumps(_describe(repo, rest, self.files[repo])).encode()
        content = self.files[repo].get("/".join(rest[2:]))
        if content is None:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": _COMMIT % 0}, b""
        etag = f'"{hashlib.sha1(content).hexdigest()}"'
        return 200, {"ETag": etag, "X-Repo-Commit": _COMMIT % 0}, content

    def _write(self, method: str, path: str, token: str, body: bytes) -> tuple[int, Any]:
        if path.startswith("/lfs/"):  # the address is the permission
            assert (method, hashlib.sha256(body).hexdigest()) == ("PUT", path[5:])
            self.objects[path[5:]] = body
            self.uploads.append(path[5:])
            return 200, {}
        if token != TOKEN:
            return 401, {"error": "Invalid credentials in Authorization header"}
        words = path.partition("?")[0].strip("/").split("/")
        if words == ["api", "repos", "create"]:
            return self._create(json.loads(body))
        if words == ["api", "validate-yaml"]:
            header = json.loads(body)["content"].split("---\n")[1]
            assert isinstance(yaml.safe_load(header), dict)
            return 200, {"warnings": [], "errors": []}
        if words[2:] == ["info", "lfs", "objects", "batch"]:
            return 200, self._plan(json.loads(body)["objects"])
        repo = "/".join(words[2:4])
        if repo not in self.files:
            return 404, {"error": "Repository not found"}
        if words[4:] == ["preupload", "main"]:
            return 200, {"files": [self._mode(repo, each) for each in json.loads(body)["files"]]}
        assert words[4:] == ["commit", "main"], path
        return 200, self._commit(repo, [json.loads(line) for line in body.splitlines()])

    def _create(self, asked: dict[str, Any]) -> tuple[int, Any]:
        repo = f"{asked['organization']}/{asked['name']}"
        url = {"url": f"{self.url}/{repo}"}
        if repo in self.files:
            return 409, {"error": "You already created this model repo", **url}
        if asked["organization"] != "team":
            return 403, {"error": f"You don't have the rights to create a model under {repo}"}
        self.files[repo] = {}
        self.private[repo] = asked.get("private") or asked.get("visibility") == "private"
        return 200, url

    def _mode(self, repo: str, asked: dict[str, Any]) -> dict[str, Any]:
        name = asked["path"]
        is_large = name.endswith((".safetensors", ".bin"))
        known = self.files[repo].get(name)
        oid = None
        if known is not None:
            blob = b"blob %d\0%b" % (len(known), known)
            found = hashlib.sha256(known) if is_large else hashlib.sha1(blob)
            oid = found.hexdigest()
        mode = "lfs" if is_large else "regular"
        return {"path": name, "uploadMode": mode, "shouldIgnore": False, "oid": oid}

    def _plan(self, objects: list[dict[str, Any]]) -> dict[str, Any]:
        def plan(each: dict[str, Any]) -> dict[str, Any]:
            upload = {"upload": {"href": f"{self.url}/lfs/{each['oid']}", "header": {}}}
            return each if each["oid"] in self.objects else {**each, "actions": upload}

        return {"transfer": "basic", "objects": [plan(each) for each in objects]}

    def _commit(self, repo: str, lines: list[dict[str, Any]]) -> dict[str, Any]:
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "deletedFile":
                del self.files[repo][value["path"]]
                continue
            large = line["key"] == "lfsFile"
            content = self.objects[value["oid"]] if large else base64.b64decode(value["content"])
            self.files[repo][value["path"]] = content
        self.commits.append((repo, " ".join(sorted(line["value"]["path"] for line in lines[1:]))))
        commit = _COMMIT % len(self.commits)
        return {"commitUrl": f"{self.url}/{repo}/commit/{commit}", "commitOid": commit}


def _describe(repo: str, rest: list[str], files: dict[str, bytes]) -> Any:
    if rest[:1] == ["tree"]:
        return [
            {"type": "file", "path": name, "size": len(each), "oid": hashlib.sha1(each).hexdigest()}
            for name, each in files.items()
            if "/".join(rest[2:]) in ("", name.rpartition("/")[0])
        ]
    siblings = [{"rfilename": name} for name in files]
    about = {"id": repo.removeprefix("datasets/"), "sha": _COMMIT % 0, "private": False}
    return {**about, "tags": [], "siblings": siblings}


@contextmanager
def serve_hub() -> Iterator[Hub]:
    """Serve a hub on loopback."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            token = self.headers.get("Authorization", "").removeprefix("Bearer ")
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, headers, content = hub.answer(self.command, self.path, token, body)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_HEAD = do_PUT = do_POST  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub = Hub(f"http://127.0.0.1:{server.server_address[1]}")
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield hub
    server.shutdown()
    server.server_close()
