"""A run whose directory is an address in a bucket: killed on one machine, it goes on on another one."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from watching import PATIENCE, wait_until

MISSING = [name for name in ("botocore", "moto") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.fleet,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]
CLI = [sys.executable, "-m", "asyncrl.deploy.cli"]
ADDRESS = "s3://bucket-of-runs/quickstart/a"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from botocore.session import get_session
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    names = {"ACCESS_KEY_ID": "keyofthistest", "SECRET_ACCESS_KEY": "secretofthistest", "DEFAULT_REGION": "us-east-1"}
    for name, value in {**names, "ENDPOINT_URL": f"http://{host}:{port}"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    get_session().create_client("s3").create_bucket(Bucket="bucket-of-runs")
    yield
    server.stop()


def on(machine: Path) -> dict[str, str]:
    """Returns the environment of a machine of its own: a cache of its own is what one has."""
    return {**os.environ, "XDG_CACHE_HOME": str(machine)}


def finished(machine: Path, *arguments: str) -> tuple[int, str]:
    done = subprocess.run([*CLI, *arguments], capture_output=True, text=True, timeout=PATIENCE, env=on(machine))
    return done.returncode, done.stdout + done.stderr


def test_a_run_that_is_killed_goes_on_on_another_machine(store: None, quickstart_model: Path, tmp_path: Path) -> None:
    one = tmp_path / "one"
    other = tmp_path / "other"
    shown = tmp_path / "run.out"
    flags = ["--model.name", str(quickstart_model), "--evaluate.prompts=", "--training.checkpoint_every", "3"]
    with shown.open("w") as output:
        command = [*CLI, "run", "quickstart", *flags, "--steps", "5000", "--run-dir", ADDRESS]
        run = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=on(one))
        wait_until(lambda: len(re.findall(r"^step ", shown.read_text(), re.MULTILINE)) >= 12, shown.read_text)
        run.send_signal(signal.SIGKILL)
        run.wait(PATIENCE)
    status, text = finished(other, "audit", ADDRESS)
    assert (status, "the audit holds" in text) == (0, True), text
    brought = int(re.findall(r"brought step (\d+) of s3:", text)[0])
    assert brought >= 3
    status, text = finished(other, "run", "--run-dir", ADDRESS, "--steps", str(brought + 4))
    assert status == 0, text
    assert f"step {brought + 1}/{brought + 4}" in text
    assert f"step {brought + 4} is copied to {ADDRESS}" in text
    status, text = finished(other, "audit", ADDRESS)
    assert (status, "the audit holds" in text) == (0, True), text
    status, text = finished(one, "run", "--run-dir", ADDRESS, "--steps", str(brought + 6))
    assert status == 0, text
    assert f"step {brought + 5}/{brought + 6}" in text, "what another machine trained is not trained again"
    (aside,) = (one / "asyncrl" / "stored_runs").glob("*.before-*")
    assert (aside / "journal").exists()
    written = [path.read_bytes() for machine in (one, other) for path in machine.rglob("*") if path.is_file()]
    assert not any(b"secretofthistest" in data for data in written)
