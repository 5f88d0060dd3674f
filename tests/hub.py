"""A small true hub on the loopback: it serves what huggingface_hub asks for of models in folders, and counts it."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit

FIRST = "0123456789abcdef0123456789abcdef01234567"
SECOND = "89abcdef0123456789abcdef0123456789abcdef"


class Hub(ThreadingHTTPServer):
    """Holds models by name and commit, and branches. downloads: how often each file was sent. gated: names of models
    whose files are refused."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.folders: dict[tuple[str, str], Path] = {}
        self.branches: dict[tuple[str, str], str] = {}
        self.downloads: Counter[str] = Counter()
        self.gated: set[str] = set()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def put(self, name: str, folder: Path, commit: str = FIRST, branch: str = "main") -> None:
        self.folders[name, commit] = folder
        self.branches[name, branch] = commit

    def weights_sent(self) -> int:
        """Returns how often the first file of weights was sent."""
        return sum(number for file, number in self.downloads.items() if file.endswith("model.safetensors"))

    def environment(self, cache: Path) -> dict[str, str]:
        """Returns variables with which programs ask this hub, and have an empty cache of their own."""
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        return inherited | {"HF_ENDPOINT": self.address, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1"}


class _Request(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing: a test reads `downloads`."""

    def _answer(self, *, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        match path.removeprefix("/api/models/").split("/"):
            case [owner, model, "revision", revision] if path.startswith("/api/"):
                return self._about(f"{owner}/{model}", revision, body=body)
            case [owner, model, "tree", revision, *_] if path.startswith("/api/"):
                return self._tree(f"{owner}/{model}", revision, body=body)
            case ["", owner, model, "resolve", revision, *file]:
                return self._file(f"{owner}/{model}", revision, "/".join(file), body=body)
        self._send(404, b"{}", {}, body=body)

    def _found(self, name: str, revision: str) -> tuple[str, Path | None]:
        commit = self.server.branches.get((name, revision), revision)
        return commit, self.server.folders.get((name, commit))

    def _missing(self, name: str, *, body: bool) -> None:
        known = any(each == name for each, _ in self.server.folders)
        code = "RevisionNotFound" if known else "RepoNotFound"
        self._send(404, b"{}", {"X-Error-Code": code, "X-Error-Message": f"{name} is not here"}, body=body)

    def _about(self, name: str, revision: str, *, body: bool) -> None:
        commit, folder = self._found(name, revision)
        if folder is None:
            return self._missing(name, body=body)
        files = [{"rfilename": path} for path in _files(folder)]
        found = {"id": name, "modelId": name, "sha": commit, "private": False, "siblings": files, "tags": []}
        self._send(200, json.dumps(found).encode(), {"Content-Type": "application/json"}, body=body)

    def _tree(self, name: str, revision: str, *, body: bool) -> None:
        _, folder = self._found(name, revision)
        if folder is None:
            return self._missing(name, body=body)
        sizes = {path: (folder / path).stat().st_size for path in _files(folder)}
        found = [
            {"type": "file", "path": path, "size": size, "oid": _digest(folder / path)} for path, size in sizes.items()
        ]
        self._send(200, json.dumps(found).encode(), {"Content-Type": "application/json"}, body=body)

    def _file(self, name: str, revision: str, file: str, *, body: bool) -> None:
        commit, folder = self._found(name, revision)
        if folder is None or not (folder / file).is_file():
            return self._missing(name, body=body)
        if name in self.server.gated:
            headers = {"X-Error-Code": "GatedRepo", "X-Error-Message": f"Access to model {name} is restricted."}
            return self._send(403, b"{}", headers, body=body)
        data = (folder / file).read_bytes()
        self.server.downloads[f"{name}/{file}"] += body
        self._send(200, data, {"ETag": f'"{_digest(folder / file)}"', "X-Repo-Commit": commit}, body=body)

    def _send(self, status: int, data: bytes, headers: dict[str, str], *, body: bool) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(data)


def _files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _digest(path: Path) -> str:
    return hashlib.sha1(path.read_bytes(), usedforsecurity=False).hexdigest()


@contextmanager
def running_hub() -> Iterator[Hub]:
    with Hub() as hub:
        thread = Thread(target=hub.serve_forever, args=(0.05,), name="hub")
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
