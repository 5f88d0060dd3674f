"""A model is uploaded to a hub: a small one of this test, which takes files in commits as the real one does."""

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

UPLOAD = """
import sys
from pathlib import Path
from asyncrl.deploy.commands.export import upload
from asyncrl.errors import ConfigError
try:
    print(upload(Path(sys.argv[1]), sys.argv[2], "asyncrl: step 4", public=False))
except ConfigError as error:
    print(error)
"""


class Hub(ThreadingHTTPServer):
    """Keeps what was made and committed. refuses: answers everything with 403."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.made: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.message = ""
        self.refuses = False


class Answers(BaseHTTPRequestHandler):
    server: Hub

    @property
    def _address(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def do_GET(self) -> None:
        self._answer(200, {"id": "me/tiny", "sha": "0" * 40, "siblings": []})

    def do_POST(self) -> None:
        body = self._body()
        if self.server.refuses:
            self._answer(403, {"error": "this token may not write"})
        elif self.path == "/api/repos/create":
            self.server.made.append(json.loads(body))
            self._answer(200, {"url": f"{self._address}/me/tiny"})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            self._answer(
                200,
                {"files": [{"path": each["path"], "uploadMode": "regular", "shouldIgnore": False} for each in files]},
            )
        elif self.path.startswith("/api/validate-yaml"):
            self._answer(200, {"errors": [], "warnings": []})
        else:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "header":
                    self.server.message = line["value"]["summary"]
                elif line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self._answer(
                200, {"success": True, "commitOid": "1" * 40, "commitUrl": f"{self._address}/me/tiny/commit/1"}
            )

    def _body(self) -> bytes:
        if self.headers.get("transfer-encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("content-length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Prints nothing."""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, name="hub")
        thread.start()
        yield server
        server.shutdown()
        thread.join(10)


def uploaded(hub: Hub, folder: Path, name: str) -> str:
    environment = {
        **os.environ,
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_HUB_OFFLINE": "0",
        "HF_TOKEN": "hf_test",
        "HF_HOME": str(folder.parent / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    command = [sys.executable, "-c", UPLOAD, str(folder), name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_model_is_committed_to_the_hub_or_the_refusal_is_told(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    assert uploaded(hub, tmp_path / "model", "me/tiny") == f"http://127.0.0.1:{hub.server_port}/me/tiny/commit/1"
    assert [made["name"] for made in hub.made] == ["tiny"]
    assert hub.made[0]["visibility"] == "private"
    assert hub.files == {"config.json": b"{}", "model.safetensors": b"weights"}
    assert hub.message == "asyncrl: step 4"
    hub.refuses = True
    told = uploaded(hub, tmp_path / "model", "me/tiny")
    assert told.startswith("me/tiny could not be uploaded to http://127.0.0.1:")
    assert "HF_TOKEN" in told
