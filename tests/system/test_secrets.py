"""No secret key of a run is where others may read it: in its files, its output, a command line or an environment."""

import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import pytest
from zmq.utils import z85

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from torchless_runs import Run  # noqa: E402
from watching import PATIENCE  # noqa: E402

KEPT = ("commands.json",)
"""Files that hold keys, of mode 0600."""


def forms(secret: str) -> Iterator[bytes]:
    """Yields what a secret key looks like: as text, inside JSON, as bytes, in hex, and as the password made from it."""
    yield secret.encode()
    yield json.dumps(secret)[1:-1].encode()
    yield z85.decode(secret.encode())
    yield z85.decode(secret.encode()).hex().encode()
    yield sha256(secret.encode()).hexdigest().encode()


def leaks(secrets: Iterable[str], places: Iterable[tuple[str, bytes]]) -> list[str]:
    """Returns the places that hold a secret."""
    wanted = [form for secret in secrets for form in forms(secret)]
    return [name for name, content in places if any(form in content for form in wanted)]


def about_processes(pids: Iterable[int]) -> Iterator[tuple[str, bytes]]:
    for pid in pids:
        for name in ("cmdline", "environ"):
            with suppress(OSError):
                yield f"{name} of {pid}", Path(f"/proc/{pid}/{name}").read_bytes()


def files_below(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yields the files of a run, which may rename or remove folders meanwhile."""
    for parent, _, names in os.walk(folder):
        for path in (Path(parent, name) for name in names if name not in KEPT):
            with suppress(FileNotFoundError):
                yield str(path), path.read_bytes()


@pytest.mark.fleet
@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("wire", ["tcp", "ipc"])
def test_a_run_writes_and_shows_no_secret_key(wire: str, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", ["--steps", "12", "--fleet.wire", wire])
    with run.running() as process:
        run.until_step(process, 4)
        commands = run.directory / "commands.json"
        assert commands.stat().st_mode & 0o777 == 0o600
        secrets = run.secrets
        assert json.loads(commands.read_text())["secret"] in secrets
        processes = [*run.processes()]
        assert len(processes) >= 4, "the controller and three workers"
        assert leaks(secrets, about_processes(processes)) == []
        assert leaks(secrets, files_below(run.directory)) == []
        assert process.wait(PATIENCE) == 0, run.shown
    assert len({*run.secrets}) >= (6 if wire == "tcp" else 2), "of the controller and each worker on TCP"
    assert leaks(run.secrets, [*files_below(run.directory), ("the output", run.output.read_bytes())]) == []


def test_a_leak_would_be_seen(tmp_path: Path) -> None:
    secret = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
    for number, form in enumerate(forms(secret)):
        (tmp_path / str(number)).write_bytes(b"before " + form + b" behind")
    (tmp_path / "harmless").write_bytes(b"nothing")
    assert len(leaks([secret], files_below(tmp_path))) == 5
