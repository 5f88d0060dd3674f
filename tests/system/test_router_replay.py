"""A fleet trains a tiny model of experts on episodes, with the experts that generation chose."""

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.controller.journal.audit import audit
from asyncrl.engines.models.warmed_up_model import build_tokenizer

sys.path.insert(0, str(Path(__file__).parent))
from programs import finished
from watching import PATIENCE

pytestmark = [pytest.mark.fleet, pytest.mark.ranks, pytest.mark.usefixtures("programs")]

STEPS = 3
EPISODES = """
from asyncrl import Observation

class Counting:
    async def reset(self, row, seed):
        self.turns = 0
        return Observation(row["prompt"])
    async def step(self, message):
        self.turns += 1
        return Observation(":", reward=message.count("a"), done=self.turns == 3)
"""


def moe_model(folder: Path) -> Path:
    torch.manual_seed(0)
    tokenizer = build_tokenizer(())
    shape = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 12}
    ends = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "max_position_embeddings": 256}
    config = AutoConfig.for_model("qwen3_moe", **shape, **experts, **ends)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("layout", ["{}", "{ ep = 2 }"])
def test_episodes_of_a_model_of_experts_train_with_their_record(layout: str, tmp_path: Path) -> None:
    """Records go from the engine over the environment's rows to trainer and reference, in turns that go on; also where
    two ranks share out the experts."""
    model = moe_model(tmp_path / "model")
    (tmp_path / "episodes.py").write_text(EPISODES)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"say {number}"}) + "\n" for number in range(40)))
    experiment = tmp_path / "moe.toml"
    experiment.write_text(f"""
name = "moe"
steps = {STEPS}
model = {{ name = {json.dumps(str(model))} }}
task = {{ prompts = {json.dumps(str(prompts))}, samples_per_prompt = 4, prompts_per_step = 2, max_prompt_tokens = 32 }}
environment = {{ use = "episodes.py:Counting", max_turns = 3, max_tokens = 48 }}
generation = {{ max_new_tokens = 8, slots = 8 }}
algorithm = {{ preset = "grpo", kl = 0.1 }}
training = {{ learning_rate = 1e-4, router_replay = true, layout = {layout} }}
reference = {{ router_replay = true }}
""")
    run_dir = tmp_path / "run"
    program = [sys.executable, "-m", "asyncrl.deploy.cli", "run", str(experiment), "--run-dir", str(run_dir)]
    done = finished(program, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == STEPS
    assert steps[0]["mismatch/other_experts"] < 0.01, "the trainer's routers choose what those of the engine chose"
    assert abs(steps[0]["policy/kl_reference"]) < 1e-4
    assert steps[0]["policy/logprob_difference_max"] < 1e-3
    assert max(step["mismatch/other_experts"] for step in steps) > 0, "later steps have changed the routers"
    report = audit(run_dir)
    assert report.ok, str(report)
