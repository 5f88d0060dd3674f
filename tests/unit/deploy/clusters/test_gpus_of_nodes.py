"""The files for Slurm and compose start a worker for each GPU of a machine."""

import os
import re
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncrl.config.placement import ANY_HOST, Placement
from asyncrl.config.schema import Config
from asyncrl.config.sources import load

ROOT = Path(__file__).parents[4]
RECORD = '#!/bin/bash\nprintf "%s\\0" "$(basename "$0")" "$@" >"$RECORDED/$$.$(basename "$0")"\n'
"""Stands for a program that is started: writes its name and arguments."""
GPUS = '#!/bin/bash\nfor number in $(seq "$SEEN"); do echo "/dev/nvidia$number"; done\n'
"""Stands for the `ls` of a container's GPUs."""

FILE = """
[model]
name = "m"
[task]
prompts = "p"
[[reward.functions]]
use = "exact_match"
[training]
pool = "train"
layout = { shard = 2 }
[pools.train]
devices = ["cuda:0", "cuda:1"]
hosts = ["n1"]
[fleet]
wire = "tcp"
listen = "tcp://127.0.0.1:7000"
joined = { training = 2 }
"""
FAILING = """\
#!/bin/bash
if mkdir "$RECORDED/first" 2>/dev/null; then
  exec 3<>"$RECORDED/ready"; read -ru3; read -ru3
  exit 75
fi
trap 'kill $!; echo left; exit 0' TERM
tail -f /dev/null &
echo >"$RECORDED/ready"
wait
"""
"""Stands for workers of which the first fails once two others are there; these leave when they are told to."""


def started(script: Sequence[str], folder: Path, variables: Mapping[str, str]) -> list[list[str]]:
    """Runs a script and returns the commands that it starts."""
    programs = folder / "bin"
    recorded = folder / "recorded"
    programs.mkdir()
    recorded.mkdir()
    for name, text in {"srun": RECORD, "asyncrl": RECORD, "ls": GPUS}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    path = {"PATH": f"{programs}:{os.environ['PATH']}", "RECORDED": str(recorded), "HOME": str(folder)}
    done = subprocess.run(script, env=path | variables, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return [path.read_text().split("\0")[:-1] for path in sorted(recorded.iterdir())]


def config_of(command: Sequence[str], listen: str) -> Config:
    """Returns the config of `asyncrl run NAME ...`, with the flags that are keys of it."""
    flags = list(command[3:])
    keys = []
    for flag, value in zip(flags, [*flags[1:], ""], strict=True):
        if re.match(r"--\w+\.|--pools", flag) and not flag.startswith("--fleet.join_keys"):
            keys += [flag] if "=" in flag.partition(" ")[0] else [flag, value]
    return load(command[2], [*keys, "--fleet.listen", listen, "--fleet.wire", "tcp", "--evaluate.prompts="]).config


@pytest.mark.parametrize(
    ("nodes", "gpus", "variables", "train", "generate"),
    [
        (8, 8, {"TRAIN_NODES": "2"}, (2, 16), (6, 48)),
        (3, 4, {}, (1, 4), (2, 8)),
        (2, 8, {"LAYOUT": "{tp = 2, dp = 4}"}, (1, 8), (1, 8)),
        (5, 2, {"TRAIN_NODES": "3", "GPUS": "2"}, (3, 6), (2, 4)),
    ],
)
def test_slurm_starts_a_worker_on_each_gpu_of_each_node(
    nodes: int,
    gpus: int,
    variables: Mapping[str, str],
    train: tuple[int, int],
    generate: tuple[int, int],
    tmp_path: Path,
) -> None:
    given = {"SLURM_NNODES": str(nodes), "SLURM_GPUS_ON_NODE": str(gpus), "FOLDER": str(tmp_path / "run")} | variables
    commands = started(["bash", str(ROOT / "deploy" / "slurm.sbatch")], tmp_path, given)
    steps = {}
    for command in (each for each in commands if each[0] == "srun"):
        at = command.index("asyncrl")
        options = dict(option.removeprefix("--").split("=") for option in command[1:at] if "=" in option)
        assert options["gres"] == f"gpu:{gpus}"
        assert options["ntasks-per-node"] == str(gpus)
        assert options["gpu-bind"] == "single:1", "a task has a GPU of its own"
        steps[command[at + 2]] = {key: int(options[key]) for key in ("nodes", "ntasks", "relative")}
    assert steps == {
        "training": {"nodes": train[0], "ntasks": train[1], "relative": 0},
        "generation": {"nodes": generate[0], "ntasks": generate[1], "relative": train[0]},
    }
    assert sum(each["ntasks"] for each in steps.values()) == nodes * gpus, "no GPU is idle"
    (run,) = (each for each in commands if each[:2] == ["asyncrl", "run"])
    placed = Placement.of(config_of(run, "tcp://127.0.0.1:7000")).workers
    for service in ("training", "generation"):
        assert len(placed[service]) == steps[service]["ntasks"], "as many as the run waits for"
        assert all(each.joins and each.on_gpu and each.host == ANY_HOST for each in placed[service])


def test_slurm_runs_a_file_with_pools_of_other_hosts_unchanged(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text(FILE)
    given = {"SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "4", "FOLDER": str(tmp_path / "run"), "EXPERIMENT": str(recipe)}
    commands = started(["bash", str(ROOT / "deploy" / "slurm.sbatch")], tmp_path, given)
    (run,) = (each for each in commands if each[:2] == ["asyncrl", "run"])
    placed = Placement.of(config_of(run, "tcp://127.0.0.1:7000")).workers
    assert {len(placed[name]) for name in ("training", "generation")} == {4}


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"SLURM_NNODES": "1", "SLURM_GPUS_ON_NODE": "8"}, "on one node run: asyncrl run quickstart"),
        ({"SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "8", "TRAIN_NODES": "2"}, "leaves none of 2 nodes for generation"),
        ({"SLURM_NNODES": "4", "TRAIN_NODES": "2"}, "TRAIN_NODES=2 is of nodes with GPUs"),
    ],
)
def test_slurm_refuses_nodes_that_leave_none_for_a_service(
    variables: Mapping[str, str], says: str, tmp_path: Path
) -> None:
    script = ["bash", str(ROOT / "deploy" / "slurm.sbatch")]
    done = subprocess.run(
        script, env=os.environ | variables | {"FOLDER": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert says in done.stderr


def compose(service: str, variables: Mapping[str, str]) -> dict[str, Any]:
    """Returns a service of the compose file, with the variables put in as compose does."""
    found: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"][service]

    def put_in(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: put_in(each) for key, each in value.items()}
        if isinstance(value, list):
            return [put_in(each) for each in value]
        return _interpolated(value, variables) if isinstance(value, str) else value

    put: dict[str, Any] = put_in(found)
    return put


def _interpolated(text: str, variables: Mapping[str, str]) -> str:
    inner = re.compile(r"(?<!\$)\$\{(\w+)(?::([-+])([^${}]*(?:\$\$\w+)?[^${}]*))?\}")
    while (match := inner.search(text)) is not None:
        name, sign, word = match.groups()
        value = variables.get(name, "")
        chosen = (word if value else "") if sign == "+" else (value or word or "")
        text = text[: match.start()] + chosen + text[match.end() :]
    return text.replace("$$", "$")


@pytest.mark.parametrize(
    ("gpus", "variables", "train", "generate"),
    [
        (8, {"TRAINING": "4"}, 4, 4),
        (4, {"TRAINING": "2", "GENERATION": "1"}, 2, 1),
        (1, {}, 1, 1),
        (16, {"REFERENCE": "1", "TRAINING": "8", "FLAGS": "--algorithm.kl 0.1"}, 8, 8),
    ],
)
def test_compose_starts_a_worker_on_each_gpu_of_the_machine(
    gpus: int, variables: Mapping[str, str], train: int, generate: int, tmp_path: Path
) -> None:
    commands = []
    for service in ("controller-gpu", "training-gpu", "generation-gpu"):
        found = compose(service, variables)
        (tmp_path / service).mkdir()
        own = {"SEEN": str(gpus)} | {key: value or "" for key, value in found["environment"].items()}
        commands += started([*found["entrypoint"], *found["command"]], tmp_path / service, own)
        assert found["deploy"]["resources"]["reservations"]["devices"][0]["count"] == "all"
    served = Counter(command[2] for command in commands if command[1] == "join")
    assert served == {"training": train, "generation": generate}
    (run,) = (command for command in commands if command[1] == "run")
    placed = Placement.of(config_of(run, "tcp://127.0.0.1:7000")).workers
    assert (len(placed["training"]), len(placed["generation"])) == (train, generate)
    devices = Counter(device for name in ("training", "generation") for each in placed[name] for device in each.devices)
    assert len(devices) == min(gpus, train + generate), "no two share one while another is idle"


def test_a_worker_that_fails_ends_its_container_and_a_stop_waits_for_all(tmp_path: Path) -> None:
    found = compose("generation-gpu", {})
    own = {"SEEN": "4"} | {key: value or "" for key, value in found["environment"].items()}
    script = [*found["entrypoint"], *found["command"]]
    started(script, tmp_path, own)
    (tmp_path / "bin" / "asyncrl").write_text(FAILING)
    os.mkfifo(tmp_path / "recorded" / "ready")
    path = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "RECORDED": str(tmp_path / "recorded")}
    done = subprocess.run(script, env=path | own, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.split()) == (75, ["left", "left"])
