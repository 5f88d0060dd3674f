"""Workers of a run on a Ray cluster: of this machine, and of three hosts of which one dies. They need Ray: scripts/test
ray."""

import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from asyncrl.controller.journal.audit import audit
from asyncrl.telemetry.jsonl import read_lines
from tests.network_hosts import HostProgram, NetworkHosts, network_hosts, why_no_hosts
from tests.processes import descendants

sys.path.insert(0, str(Path(__file__).parent))
from watching import PATIENCE, dead, wait_until

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed; scripts/test ray installs it")
pytestmark = [pytest.mark.fleet, needs_ray]

CLI = [sys.executable, "-m", "asyncrl.deploy.cli"]
RAY = str(Path(sys.executable).with_name("ray"))
QUICK_DEATHS = {
    "RAY_health_check_initial_delay_ms": "10000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "10000",
    "RAY_health_check_failure_threshold": "3",
}


def run_command(run_dir: Path, model: Path, *flags: str) -> list[str]:
    keys = ["--run-dir", str(run_dir), "--model.name", str(model), "--evaluate.prompts=", "--steps", "5000"]
    return [*CLI, "run", "quickstart", "--on", "ray", *keys, *flags]


def step(shown: Path) -> int:
    return len(re.findall(r"^step \d+/", shown.read_text(), re.MULTILINE)) if shown.exists() else 0


def events(run_dir: Path, event: str) -> list[str]:
    """Returns the generation instances with this event, in its order."""
    lines = read_lines(run_dir / "logs" / "controller.jsonl")
    return [line["instance"] for line in lines if line["event"] == event and line["instance"].startswith("generation")]


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


@contextmanager
def program(command: list[str], output: Path) -> Iterator["subprocess.Popen[bytes]"]:
    with output.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait(20)


def assert_no_secret(folder: Path, *tokens: str) -> None:
    """Asserts that no file of the run but those of its keys holds a key or a token."""
    keys = [line for path in (folder / "join_keys").glob("*.key") for line in path.read_text().splitlines()]
    held = [*tokens, *(line.split('"')[3] for line in keys if '"secret"' in line)]
    assert len(held) >= 2
    files = [path for path in folder.rglob("*") if path.is_file() and path.parent.name != "join_keys"]
    texts = {path: path.read_bytes() for path in files if path.stat().st_size < 1 << 22}
    assert not [path for path, text in texts.items() for secret in held if secret.encode() in text]


def test_an_actor_that_is_killed_is_started_again_and_joins_again(quickstart_model: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shown = tmp_path / "run.out"
    with program(run_command(run_dir, quickstart_model), shown) as run:
        wait_until(lambda: step(shown) >= 3 or run.poll() is not None, shown.read_text)
        assert "RAY_AUTH_TOKEN=" not in environment_of_workers(run.pid)
        (actor,) = [pid for pid in descendants(run.pid) if is_serving(pid, "generation")]
        os.kill(parent(actor), signal.SIGKILL)
        wait_until(lambda: len(events(run_dir, "WorkerStarted")) == 2, shown.read_text)
        assert dead(actor), "a host ends with its actor"
        reached = step(shown)
        wait_until(lambda: step(shown) > reached + 1, shown.read_text)
        of_ray = descendants(run.pid)
        run.send_signal(signal.SIGINT)
        assert run.wait(PATIENCE) == 0, shown.read_text()
        wait_until(lambda: all(map(dead, of_ray)), "the cluster to end with the run", 20.0)
    assert "joined the run at" in (run_dir / "logs" / "ray-generation0.out").read_text()
    assert_no_secret(run_dir)
    report = audit(run_dir)
    assert report.ok, str(report)


def is_serving(pid: int, service: str) -> bool:
    return f"asyncrl.deploy.cli join {service} " in command_line(pid)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def environment_of_workers(run: int) -> str:
    """Returns the variables of all hosts of a run and of what they started."""
    serving = [pid for pid in descendants(run) if "asyncrl.deploy.cli join " in command_line(pid)]
    assert serving
    workers = {each for pid in serving for each in (pid, *descendants(pid))}
    return "".join(Path(f"/proc/{pid}/environ").read_text() for pid in workers if not dead(pid))


OWN_FOLDER = """\
mountpoint -q "$0" || mount --bind "$1" "$0"
shift
exec "$@"
"""
"""Shell script with which a program sees a folder of its host ($1) at the path ($0) that all hosts have for theirs."""


class RayHosts:
    """A Ray cluster on hosts of a network: the first one is the head, and takes jobs; all others have a `rollout`. own:
    path at which each host has a folder of its own."""

    def __init__(self, hosts: NetworkHosts, folder: Path) -> None:
        self.hosts = hosts
        self.folder = folder
        self.own = folder / "own"
        self.own.mkdir()
        self.token = secrets.token_hex(32)
        caches = {"XDG_CACHE_HOME": str(self.own / "cache"), "TMPDIR": str(self.own)}
        self.environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token, **caches, **QUICK_DEATHS}

    def folder_of(self, number: int) -> Path:
        """Returns the folder of a host, as it is seen from outside."""
        path = self.folder / f"h{number}"
        path.mkdir(exist_ok=True)
        return path

    def start(self, number: int) -> HostProgram:
        """Starts a host that is the head, or joins the cluster."""
        # A short name, since sockets lie below it.
        own = ["--head", "--port=6379", "--dashboard-host=10.77.0.1", "--num-cpus=2", f"--temp-dir={self.own}/r"]
        if number > 1:
            own = ["--address=10.77.0.1:6379", "--num-cpus=1", '--resources={"rollout": 1}']
        common = ["--disable-usage-stats", "--object-store-memory=80000000", "--block"]
        command = [RAY, "start", f"--node-ip-address={self.hosts.address(number)}", *own, *common]
        return self._run(number, command, self.folder / f"{number}.ray")

    def _run(self, number: int, command: list[str], output: Path) -> HostProgram:
        script = ["bash", "-c", OWN_FOLDER, str(self.own), str(self.folder_of(number))]
        return self.hosts.start(number, [*script, *command], output, self.environment)

    def said(self) -> str:
        """Returns what nodes and job printed."""
        paths = sorted(path for path in self.folder.iterdir() if path.suffix in (".ray", ".out"))
        return "".join(f"{path.name}:\n{path.read_text()}" for path in paths)

    def submit(self, command: list[str], shown: Path) -> HostProgram:
        """Runs a command as a job, once the head takes jobs."""
        job = shlex.join([RAY, "job", "submit", "--address", "http://10.77.0.1:8265", "--", *command])
        ready = "until (exec 3<>/dev/tcp/10.77.0.1/8265) 2>/dev/null; do sleep 0.5; done"
        return self._run(1, ["bash", "-c", f"{ready}; exec {job}"], shown)


@pytest.fixture
def short_path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="arl-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "-")
def test_a_node_that_is_killed_comes_back_into_a_job_of_ray(quickstart_model: Path, short_path: Path) -> None:
    shown = short_path / "job.out"
    flags = ["--generation.replicas", "2", "--fleet.ray_resources", "{generation = {rollout = 1}}"]
    with network_hosts(short_path, 3) as hosts:
        ray = RayHosts(hosts, short_path)
        run_dir = ray.folder_of(1) / "run"  # No other host sees it, nor the model.
        shutil.copytree(quickstart_model, ray.folder_of(1) / "model")
        head = ray.start(1)
        ray.start(2)
        ray.start(3)
        job = ray.submit(run_command(ray.own / "run", ray.own / "model", *flags), shown)
        wait_until(lambda: step(shown) >= 3, ray.said, 200.0)
        hosts.kill(3)
        wait_until(lambda: len(events(run_dir, "WorkerLost")) == 1, shown.read_text, 30.0)
        reached = step(shown)
        wait_until(lambda: step(shown) > reached + 1, "the run to go on without the node")
        ray.start(3)
        wait_until(lambda: len(events(run_dir, "WorkerStarted")) == 3, ray.said)
        reached = step(shown)
        wait_until(lambda: step(shown) > reached + 1, shown.read_text)
        (run,) = [pid for pid in descendants(head.pid or 0) if command_line(pid).startswith(" ".join([*CLI, "run "]))]
        os.kill(run, signal.SIGINT)
        assert job.wait(PATIENCE) == 0, shown.read_text()
    assert "placed by Ray: generation0 on h" in shown.read_text()
    warnings = [line for line in shown.read_text().splitlines() if "warning" in line]
    assert all("reward.functions were not tried" in each for each in warnings), "Ray places workers of rewards"
    logged = {path.name for path in (run_dir / "logs").glob("generation*.jsonl")}
    assert {f"{instance}.jsonl" for instance in events(run_dir, "WorkerStarted")[1:]} <= logged, (
        "of all hosts that live"
    )
    assert_no_secret(run_dir, ray.token)
    report = audit(run_dir)
    assert report.ok, str(report)
