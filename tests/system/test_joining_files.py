"""Workers that join from hosts with file systems of their own: a mount namespace hides the controller's files."""

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from asyncrl.controller.journal.audit import audit

sys.path.insert(0, str(Path(__file__).parent))
from test_joining import CLI, free_address, program, steps_in
from watching import PATIENCE, wait_until

pytestmark = [pytest.mark.fleet, pytest.mark.kills, pytest.mark.usefixtures("programs")]

HIDDEN = ("unshare", "--user", "--map-root-user", "--mount")
REWARD = "from letters import same\n\n\ndef score(sample):\n    return same(sample.text, sample.row['answer'])\n"
HELPER = "def same(one, other):\n    return float(one.strip() == other)\n"


@contextmanager
def host(role: str, address: str, tmp_path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Serves where `controller` is an empty folder."""
    script = f'mount -t tmpfs tmpfs {tmp_path / "controller"} && exec "$@"'
    serve = [*CLI, "join", role, "--to", address, "--key", f"{tmp_path}/keys/{role}.key"]
    command = [*HIDDEN, "bash", "-c", script, "bash", *serve, "--cache", str(tmp_path / role)]
    with (tmp_path / f"{role}.out").open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait(20)


def test_workers_on_hosts_that_see_no_file_of_the_controller_train_with_it(
    quickstart_model: Path, tmp_path: Path
) -> None:
    if subprocess.run([*HIDDEN, "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)], capture_output=True).returncode:
        pytest.skip("needs a mount namespace of its own")
    hidden = tmp_path / "controller"
    keys = tmp_path / "keys"
    shown = tmp_path / "run.out"
    address = free_address()
    model = hidden / "model"
    run_dir = hidden / "run"
    shutil.copytree(quickstart_model, model)
    (hidden / "rewards.py").write_text(REWARD)
    (hidden / "letters.py").write_text(HELPER)
    for role in ("generation", "reward"):
        subprocess.run([*CLI, "admit", str(keys), role], check=True, capture_output=True)
    flags = ["--run-dir", str(run_dir), "--model.name", str(model), "--steps", "5000", "--evaluate.prompts="]
    flags += ["--listen", address, "--fleet.joined", "{generation = 1, reward = 1}", "--fleet.join_keys", str(keys)]
    flags += ["--reward.functions", f'["{hidden}/rewards.py:score"]']
    with (
        program("run", "quickstart", *flags, output=shown) as run,
        host("generation", address, tmp_path) as generation,
        host("reward", address, tmp_path) as reward,
    ):
        wait_until(lambda: steps_in(shown) >= 3, lambda: "".join(path.read_text() for path in tmp_path.glob("*.out")))
        run.send_signal(signal.SIGINT)
        assert run.wait(PATIENCE) == 0, shown.read_text()
        assert (generation.wait(20), reward.wait(20)) == (0, 0)
    for role, copied in (("generation", model / "model.safetensors"), ("reward", hidden / "letters.py")):
        assert any(copied.read_bytes() == path.read_bytes() for path in (tmp_path / role).rglob(copied.name)), role
        assert list((tmp_path / role / "runs").glob(f"*/logs/{role}*.jsonl")), "its log is on its host"
    assert not any((tmp_path / "reward").rglob("*.safetensors")), "a reward worker needs the tokenizer only"
    assert not list(run_dir.glob("logs/generation*.jsonl"))
    assert audit(run_dir).ok
