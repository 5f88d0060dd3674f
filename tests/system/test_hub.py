"""Runs, trials and evaluations of a model of the hub, which is a small true one on the loopback."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hub import FIRST, Hub, running_hub
from tests.unit.engines.generation.conftest import make_model

sys.path.insert(0, str(Path(__file__).parent))
from watching import PATIENCE

pytestmark = [pytest.mark.fleet, pytest.mark.slow]

EXPERIMENT = """
steps = 1
[model]
name = "owner/tiny"
[task]
prompts = "rows.jsonl"
prompts_per_step = 2
samples_per_prompt = 2
[generation]
max_new_tokens = 4
[evaluate]
prompts = "rows.jsonl"
[[reward.functions]]
use = "length"
options = { maximum = 9, slack = 1 }
[telemetry]
report = false
"""


def ran(hub: Hub, folder: Path, *arguments: str, **variables: str) -> str:
    command = [sys.executable, "-m", "asyncrl.deploy.cli", *arguments]
    environment = hub.environment(folder / "home") | {"OMP_NUM_THREADS": "1"} | variables
    # Not forked: huggingface_hub reads its variables when it is imported.
    done = subprocess.run(command, timeout=PATIENCE, cwd=folder, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_all_commands_share_one_download_and_then_need_no_network(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": letter}) + "\n" for letter in "abcd"))
    (tmp_path / "e.toml").write_text(EXPERIMENT)
    with running_hub() as hub:
        hub.put("owner/tiny", make_model("llama", tmp_path / "tiny"))
        for run in ("first", "second"):
            ran(hub, tmp_path, "run", "e.toml", "--run-dir", run)
        ran(hub, tmp_path, "try", "e.toml", "--rows", "1")
        ran(hub, tmp_path, "evaluate", "owner/tiny", "--task", "e.toml")
        assert hub.downloads["owner/tiny/model.safetensors"] == 1
    ran(hub, tmp_path, "run", "e.toml", "--run-dir", "third", HF_HUB_OFFLINE="1")
    said = ran(hub, tmp_path, "run", "e.toml", "--run-dir", "third", "--steps", "2", HF_HUB_OFFLINE="1")
    assert "resuming" in said
    for run in ("first", "second", "third"):
        assert (tmp_path / run / "model").resolve().name == FIRST
        assert json.loads((tmp_path / run / "hub.json").read_text()) == {"owner/tiny": FIRST}
    ready = ran(hub, tmp_path, "doctor", "e.toml", HF_HUB_OFFLINE="1")
    assert "parameters" in ready, "the cache is looked at"
