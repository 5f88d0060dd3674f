"""Ranks of the trainer that join from two network hosts, and meet there."""

import json
import re
import signal
import sys
from pathlib import Path

import pytest

from asyncrl.controller.journal.audit import audit
from tests.network_hosts import network_hosts, why_no_hosts
from tests.unit.deploy.commands.test_recipe_on_hosts import EIGHT, RECIPE

sys.path.insert(0, str(Path(__file__).parent))
from watching import PATIENCE, wait_until

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.fleet,
    pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "-"),
]
CLI = [sys.executable, "-m", "asyncrl.deploy.cli"]


def test_two_ranks_train_on_two_hosts_and_the_death_of_one_ends_the_run(quickstart_model: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    keys = tmp_path / "keys"
    shown = tmp_path / "run.out"
    variables = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with network_hosts(tmp_path, 3) as hosts:
        address = f"tcp://{hosts.address(1)}:7000"
        assert hosts.start(1, [*CLI, "admit", str(keys), "training"], tmp_path / "admit.out").wait(PATIENCE) == 0
        flags = ["--run-dir", str(run_dir), "--model.name", str(quickstart_model), "--evaluate.prompts="]
        flags += ["--listen", address, "--fleet.joined", "{training = 2}", "--training.layout.dp", "2"]
        flags += ["--fleet.join_keys", str(keys), "--steps", "5000"]
        run = hosts.start(1, [*CLI, "run", "quickstart", *flags], shown, variables)
        serve = [*CLI, "join", "training", "--to", address, "--key", str(keys / "training.key")]
        ranks = [hosts.start(host, serve, tmp_path / f"h{host}.out", variables) for host in (2, 3)]
        wait_until(lambda: len(steps(shown)) >= 5, shown.read_text, PATIENCE)
        ranks[1].send_signal(signal.SIGKILL)
        assert run.wait(PATIENCE) == 75, shown.read_text()
        assert "Resume with" in shown.read_text()
    lines = [json.loads(line) for line in (run_dir / "fleet.jsonl").read_text().splitlines()]
    places = {line["rank"]: line["host"] for line in lines if line.get("service") == "training"}
    assert places.keys() == {0, 1}
    assert set(places.values()) == {"h2", "h3"}
    assert audit(run_dir).ok


def test_the_recipe_of_eight_hosts_trains_a_tiny_model_on_three_with_neighbouring_ranks_on_one(
    quickstart_model: Path, tmp_path: Path
) -> None:
    """The file is that of eight hosts with eight GPUs, with CPUs for GPUs and two ranks a host."""
    run_dir = tmp_path / "run"
    keys = tmp_path / "keys"
    shown = tmp_path / "run.out"
    mine = tmp_path / "recipe.toml"
    variables = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    changed = {
        "MODEL": str(quickstart_model), EIGHT: '["cpu"]', '"bfloat16"': '"float32"', "= 48": "= 1", "= 16": "= 4",
        "max_new_tokens = 4096": "max_new_tokens = 8", "{ shard = 8, dp = 2 }": "{ shard = 2, dp = 2 }",
        '["n1", "n2"]': '["h3", "h2"]', '["n3", "n4", "n5", "n6", "n7", "n8"]': '["h4"]',
        "samples_per_prompt = 8": "samples_per_prompt = 2", "prompts_per_step = 64": "prompts_per_step = 4",
    }  # fmt: skip
    text = RECIPE
    for old, new in changed.items():
        assert old in text
        text = text.replace(old, new)
    mine.write_text(text)
    with network_hosts(tmp_path, 4) as hosts:
        address = f"tcp://{hosts.address(1)}:7000"
        for role in ("training", "generation"):
            assert hosts.start(1, [*CLI, "admit", str(keys), role], tmp_path / "admit.out").wait(PATIENCE) == 0
        flags = ["--run-dir", str(run_dir), "--listen", address, "--fleet.join_keys", str(keys), "--steps", "2"]
        run = hosts.start(1, [*CLI, "run", str(mine), *flags], shown, variables)
        for number, (host, role) in enumerate(
            ((2, "training"), (3, "training"), (2, "training"), (3, "training"), (4, "generation"))
        ):
            serve = [*CLI, "join", role, "--to", address, "--key", str(keys / f"{role}.key")]
            hosts.start(host, serve, tmp_path / f"{number}.out", variables)
        assert run.wait(PATIENCE) == 0, shown.read_text()
        assert steps(shown) == ["1", "2"]
    lines = [json.loads(line) for line in (run_dir / "fleet.jsonl").read_text().splitlines()]
    places = {line["rank"]: line["host"] for line in lines if line.get("service") == "training"}
    assert places == {0: "h3", 1: "h3", 2: "h2", 3: "h2"}, "in the order of their pool"
    assert "training.layout.dp = 2: 2 of 2 groups of ranks cross hosts" in shown.read_text()
    assert "training.layout.shard" not in shown.read_text()
    assert audit(run_dir).ok


def steps(shown: Path) -> list[str]:
    return re.findall(r"^step (\d+)/", shown.read_text(), re.MULTILINE)
