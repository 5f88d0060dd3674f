"""The experiment `guess-agent` on a whole fleet: each sample is what an agent, a program of its own, was answered."""

import json
import sys
from pathlib import Path

import pytest

from asyncrl.controller.journal.audit import audit
from asyncrl.engines.models.warmed_up_model import build_model, build_tokenizer

sys.path.insert(0, str(Path(__file__).parent))
from programs import finished
from watching import PATIENCE

pytestmark = [pytest.mark.fleet, pytest.mark.usefixtures("programs")]

STEPS = 3
ALONE = """
import glob, runpy
assert len(glob.glob("/proc/[0-9]*")) == 2, "an agent sees its guard and itself"
runpy.run_module("asyncrl.tasks.builtin.guess_agent", run_name="__main__")
"""
"""The agent of the experiment, in a sandbox of its own."""


def test_the_policy_trains_inside_the_agent(bubblewrap_works: None, tmp_path: Path) -> None:
    tokenizer = build_tokenizer(())
    for made in (tokenizer, build_model(tokenizer)):
        made.save_pretrained(tmp_path / "model")
    keys = {"model.name": tmp_path / "model", "steps": STEPS, "run-dir": tmp_path / "run", "evaluate.prompts": ""}
    (tmp_path / "alone.py").write_text(ALONE)
    keys |= {"environment.use": f"agent:python {tmp_path}/alone.py {{seed}}"}
    keys |= {"task.prompts_per_step": 1, "task.samples_per_prompt": 4, "telemetry.samples_per_step": "all"}
    flags = [f"--{key}={value}" for key, value in keys.items()]
    command = [sys.executable, "-m", "asyncrl.deploy.cli", "run", "guess-agent", *flags]
    done = finished(command, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    report = audit(tmp_path / "run")
    assert report.ok, str(report)
    samples = [json.loads(line) for line in (tmp_path / "run/samples.jsonl").read_text().splitlines()]
    assert len(samples) == STEPS * 4
    for sample in samples:
        *said, printed = sample["turns"]
        assert (printed["role"], float(printed["content"])) == ("agent", sample["reward"])
        assert [turn["role"] for turn in said] == ["assistant", "user"] * ((len(said) - 1) // 2) + ["assistant"]
        assert {turn["content"] for turn in said[1::2]} <= {"<", ">", "!"}
