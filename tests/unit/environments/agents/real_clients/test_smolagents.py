"""An agent of the library smolagents, unchanged: as an environment, and in a whole run of a fleet."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from asyncrl.controller.journal.audit import audit
from asyncrl.engines.models.warmed_up_model import build_model, build_tokenizer
from asyncrl.environments.agents.agent import Agent
from asyncrl.environments.tools import FORMS, ToolCall

pytest.importorskip("smolagents", reason="the extra agents is not installed")

AGENT = shlex.join([sys.executable, str(Path(__file__).with_name("smolagents_agent.py"))])


def call(name: str, **arguments: object) -> str:
    return FORMS["hermes"].render([ToolCall(name, arguments)])


async def test_the_policy_calls_tools_of_smolagents() -> None:
    """The library writes the calls of its history as text, which begins a context; an error it adds to it."""
    made = Agent(AGENT, reward="last_line")
    try:
        opening = await made.reset({"prompt": "47*8?", "answer": "376"}, 0)
        assert [message["role"] for message in opening.text] == ["system", "user"]
        assert [tool["function"]["name"] for tool in opening.tools] == ["multiply", "final_answer"]
        result = await made.step(call("multiply", a=47, b=8))
        assert result.follows == 0
        assert "376" in result.text[-1]["content"]
        last = await made.step(call("final_answer", answer="376"))
        assert (last.done, last.reward) == (True, 1.0)
        assert last.info["rewritten"] == 1
    finally:
        await made.close()


async def test_an_answer_without_a_call_is_the_policys_mistake_and_not_the_agents() -> None:
    made = Agent(AGENT, reward="last_line")
    try:
        await made.reset({"prompt": "47*8?", "answer": "376"}, 0)
        told = await made.step("It is 376.")
        assert "tool" in str(told.text[-1]["content"])
        last = await made.step(call("final_answer", answer="376"))
        assert (last.done, last.reward) == (True, 1.0)
    finally:
        await made.close()


EXPERIMENT = """
name = "smolagents"
steps = 2
[model]
name = {model}
[task]
prompts = {prompts}
prompts_per_step = 1
samples_per_prompt = 2
max_prompt_tokens = 300
[generation]
slots = 4
max_new_tokens = 8
[environment]
use = {use}
options = {{ reward = "last_line" }}
max_turns = 6
max_tokens = 1600
deadline = 60
"""


def test_a_fleet_trains_inside_smolagents(tmp_path: Path) -> None:
    """The tiny policy calls no tool, which the library tells it, and asks for the answer at the end."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer(())
    tokenizer.save_pretrained(tmp_path / "model")
    build_model(tokenizer, context=2048).save_pretrained(tmp_path / "model")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "47*8?", "answer": "376", "system": "Call tools."}) + "\n")
    file = tmp_path / "run.toml"
    run_dir = tmp_path / "run"
    values = {"model": tmp_path / "model", "prompts": rows, "use": f"agent:{AGENT}"}
    file.write_text(EXPERIMENT.format(**{name: json.dumps(str(value)) for name, value in values.items()}))
    command = [sys.executable, "-m", "asyncrl.deploy.cli", "run", str(file), "--run-dir", str(run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr
    assert audit(run_dir).ok
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    assert {turn["role"] for sample in samples for turn in sample["turns"]} >= {"assistant", "user", "context", "agent"}
    assert all("found" in sample["turns"][-1]["content"] for sample in samples)
