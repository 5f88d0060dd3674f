"""A fleet that trains adapters: deaths, late joiners, a resume, evaluation, and both kinds of export."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.config.sources import read
from asyncrl.controller.journal.audit import audit
from asyncrl.controller.journal.checkpoints import newest_model
from asyncrl.deploy import cli
from asyncrl.deploy.commands.export import export
from asyncrl.engines.models.lora import attach, load_adapters
from asyncrl.errors import ConfigError
from asyncrl.telemetry.jsonl import read_lines

sys.path.insert(0, str(Path(__file__).parent))
from programs import ended, running, until_step
from watching import pid_of

pytestmark = [pytest.mark.fleet, pytest.mark.kills, pytest.mark.usefixtures("programs")]

LORA = ["--model.lora.rank", "8", "--training.learning_rate", "1e-3"]
IDS = torch.arange(3, 15)[None]


def command(model: Path, run_dir: Path, *flags: str, steps: int) -> list[str]:
    keys = ["--model.name", str(model), "--steps", str(steps), "--training.checkpoint_every", "5", *LORA]
    keys += ["--evaluate.every", "100", "--task.samples_per_prompt", "4", "--algorithm.kl", "0.01"]
    return [sys.executable, "-m", "asyncrl.deploy.cli", "run", "quickstart", "--run-dir", str(run_dir), *keys, *flags]


def evaluated(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The reward, its error and the prompts of an evaluation."""
    assert cli.main(["evaluate", *arguments]) == 0
    return capsys.readouterr().out.strip().splitlines()[-1].partition("reward")[2].partition(", version")[0]


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_adapters_train_through_a_death_and_a_resume_and_leave_as_a_model(
    kv: str, quickstart_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A generator dies; the one that replaces it joins late, with a base model and no adapters. Then the trainer
    dies, whose successor hands adapters to both, and then the command. Reference log-probs come from the trainer."""
    run_dir = tmp_path / "run"
    flags = ["--generation.kv", kv, "--generation.replicas", "2"]
    with running(command(quickstart_model, run_dir, *flags, steps=20)) as process:
        assert "starting generation, reward, training, evaluation\n" in until_step(process, 4)
        os.kill(pid_of(run_dir, "generation"), signal.SIGKILL)
        until_step(process, 9)
        os.kill(pid_of(run_dir, "training"), signal.SIGKILL)
        shown = until_step(process, 15)
        process.send_signal(signal.SIGKILL)
        ended(process)
    assert "training0.0 died: killed by SIGKILL; the run goes on from its checkpoint of step" in shown
    assert "lost generation0.0" in (run_dir / "logs/controller.jsonl").read_text()
    with running(command(quickstart_model, run_dir, *flags, "--model.lora.alpha", "4", steps=20)) as process:
        code, shown = ended(process)
    assert code == 2
    assert "model.lora: { rank = 8 } -> { rank = 8, alpha = 4.0 }  (it changes what the run learns)" in shown
    with running(command(quickstart_model, run_dir, *flags, steps=20)) as process:
        code, shown = ended(process)
    assert code == 0, shown
    lines = list(read_lines(run_dir / "metrics.jsonl"))
    assert (lines[-1]["step"], lines[-1]["incarnation"]) == (20, 2)
    assert max(line["staleness/max"] for line in lines) <= 2
    assert max(line.get("mismatch/canary", 0.0) for line in lines) < 1e-3
    assert sum(line["staleness/mean"] for line in lines) > 0, "samples span versions"
    assert abs(lines[-1]["policy/kl_reference"]) > 1e-4
    report = audit(run_dir)
    assert report.ok, str(report)
    _exported(run_dir, quickstart_model, tmp_path)
    own = evaluated(capsys, str(run_dir))
    assert own == evaluated(capsys, str(tmp_path / "merged"), "--task", "quickstart")


def _exported(run_dir: Path, base: Path, target: Path) -> None:
    """The merged folder has the log-probs of the base model with the adapters of the checkpoint."""
    assert cli.main(["export", str(run_dir), str(target / "adapters")]) == 0
    assert cli.main(["export", str(run_dir), str(target / "merged"), "--merge"]) == 0
    saved, _ = newest_model(run_dir)
    files = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in (saved, target / "adapters")]
    assert json.loads(files[1].pop("asyncrl_export.json"))["model"] == "policy"
    assert files[1].pop("README.md").startswith(b"---\nlibrary_name: peft\n")
    assert files[0] == files[1]
    assert "adapter_model.safetensors" in files[0]
    lora = read(run_dir / "config.toml").model.lora
    assert lora is not None
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    found = [model(IDS).logits.log_softmax(-1)]
    attach(model, lora, seed=0)
    load_adapters(saved, model)
    found.append(model(IDS).logits.log_softmax(-1))
    found.append(AutoModelForCausalLM.from_pretrained(target / "merged")(IDS).logits.log_softmax(-1))
    torch.testing.assert_close(found[1], found[2], atol=2e-5, rtol=0)
    assert (found[0] - found[1]).abs().max() > 0.01


@pytest.mark.parametrize(
    "flags", [["--model.lora.targets", '["query"]'], ["--algorithm.preset", "ppo"]], ids=["target", "critic"]
)
def test_what_lora_does_not_fit_is_said_at_the_start(flags: list[str], quickstart_model: Path, tmp_path: Path) -> None:
    with running(command(quickstart_model, tmp_path / "run", *flags, steps=2)) as process:
        code, shown = ended(process)
    if flags[0] == "--algorithm.preset":
        assert code == 0, shown
        assert "warning: --model.lora.rank" in shown
        assert "the policy has adapters, but a critic trains all weights of its own model" in shown
        assert "starting generation, reward, training, reference, critic, evaluation" in shown
        return
    assert code == 2, shown
    assert "targets names 'query', and no linear layer of the model has this name" in shown
    assert "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj" in shown
    assert not (tmp_path / "run").exists()


def test_a_whole_model_has_nothing_to_merge(quickstart_model: Path, tmp_path: Path) -> None:
    keys = command(quickstart_model, tmp_path / "run", "--model.lora", "none", steps=1)
    with running([each for each in keys if each not in LORA[:2]]) as process:
        code, shown = ended(process)
    assert code == 0, shown
    with pytest.raises(ConfigError, match="nothing to merge"):
        export(tmp_path / "run", tmp_path / "merged", merged=True)
