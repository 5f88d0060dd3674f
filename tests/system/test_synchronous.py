"""eta = 0 is a special case: the fleet equals, bit for bit, a plain loop over the same engines."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.algorithms.algorithm_by_name import advantages_of
from asyncrl.config.schema import Config
from asyncrl.config.sources import load
from asyncrl.deploy.process.fork_client import Forks
from asyncrl.deploy.run_fleet import RunRequest
from asyncrl.deploy.run_setup import run
from asyncrl.engines.generation.engine_interface import Completion, Key, SampleRequest
from asyncrl.engines.generation.torch_engine import TorchEngine
from asyncrl.engines.training.critic_trainer import CriticTrainer
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.train_rows import TrainRow, ValueTarget, value_targets_of
from asyncrl.engines.training.training_step import StepOutcome, run_step
from asyncrl.objectives.advantages import RewardedCut
from asyncrl.protocols.seeds import group_seed, member_seed
from asyncrl.tasks import Draw, training_prompts
from asyncrl.telemetry.display import LineDisplay
from asyncrl.telemetry.jsonl import METRICS, read_metrics

STEPS = 20
COMPARED = ("loss/policy", "grad_norm", "policy/entropy", "policy/ratio_max", "reward/mean")
OF_A_CRITIC = ("critic/loss", "critic/grad_norm", "critic/value_mean", "critic/explained_variance", "critic/staleness")
OF_COSTS = ("cost/multiplier", *(f"cost_{name}" for name in OF_A_CRITIC))
COSTS = {"cost.functions": ["exact_match"], "cost.limit": 0.1, "cost.multiplier_rate": 2.0, "fleet.wire": "inproc"}
"""A right answer costs what it earns. In one process: six of them take long to start."""


@pytest.fixture(scope="module", params=["grpo", "ppo", "safe_rlhf"])
def config(request: pytest.FixtureRequest, quickstart_model: Path) -> Config:
    values = {
        "model.name": str(quickstart_model),
        "algorithm.preset": request.param,
        "steps": STEPS,
        "task.prompts_per_step": 4,
        "task.samples_per_prompt": 4,
        "generation.slots": 8,
        "generation.deterministic": True,
        "staleness.limit": 0,
        "evaluate.prompts": "",
        "training.checkpoint_every": 0,
        **(COSTS if request.param == "safe_rlhf" else {}),
    }
    return load("quickstart", (), {}, values).config


def plain_loop(config: Config, model: Path) -> list[dict[str, float]]:
    """Synchronous GRPO, PPO or Safe RLHF: sample, score, train, copy weights; no controller, gate, ledger or handle."""
    generator = TorchEngine(model, config, version=0)
    trainer = PolicyTrainer(config, model)
    critics = {signal: CriticTrainer(config, model, signal) for signal in value_targets_of(config.algorithm)}
    draw = Draw(training_prompts(config), config.seed)
    estimate = advantages_of(config)
    metrics = []
    for version in range(config.steps):
        groups = range(version * config.task.prompts_per_step, (version + 1) * config.task.prompts_per_step)
        completions = sample(generator, draw, groups, config)
        rewards = {key: float(done.text == draw(key[0])[1]["answer"]) for key, done in completions.items()}
        members = tuple(range(config.task.samples_per_prompt))
        cuts = [RewardedCut(group, members, {m: rewards[group, m, 0] for m in members}) for group in groups]
        advantages = dict(zip(sorted(rewards), np.concatenate(estimate(cuts, version)).tolist(), strict=True))
        rows = [train_row(completions[key], advantages[key]) for key in sorted(completions)]
        learnt: dict[str, float] = {}
        for signal, critic in critics.items():
            rows = [judged(critic, signal, row) for row in rows]
        for critic in critics.values():
            learnt |= learn(critic, rows, version)
        outcome: StepOutcome = run_step(trainer, rows, 0, version)
        generator.load(trainer.named_tensors(), version + 1, share=False)
        metrics.append({**outcome.metrics, **learnt, "reward/mean": float(np.mean(list(rewards.values())))})
    return metrics


def judged(critic: CriticTrainer, signal: ValueTarget, row: TrainRow) -> TrainRow:
    (values,) = critic.values([row])
    return replace(row, cost=row.advantage, **{signal.values: values, signal.valued_at: critic.optimizer.updates})


def learn(critic: CriticTrainer, rows: list[TrainRow], version: int) -> dict[str, float]:
    step = critic.begin(rows, 0, version)
    while step.advance():
        pass
    return step.outcome.metrics


def sample(engine: TorchEngine, draw: Draw, groups: range, config: Config) -> dict[Key, Completion]:
    """All members of all groups."""
    generation = config.generation
    done = list[Completion]()
    for group in groups:
        prompt = engine.tokenizer.prompt_ids(draw(group)[0])
        for member in range(config.task.samples_per_prompt):
            seed = member_seed(group_seed(config.seed, group), member)
            engine.submit(
                SampleRequest((group, member, 0), prompt, seed, generation.temperature, generation.max_new_tokens)
            )
    while engine.active:
        done += engine.step()
    return {completion.request.key: completion for completion in done}


def train_row(done: Completion, advantage: float) -> TrainRow:
    group, member, attempt = done.request.key
    return TrainRow(
        group=group,
        member=member,
        attempt=attempt,
        incarnation=0,
        prompt_ids=done.request.prompt.astype(np.int64),
        response_ids=done.tokens.astype(np.int64),
        logprobs=done.logprobs,
        versions=done.versions.astype(np.int64),
        advantage=advantage,
        temperature=done.request.temperature,
        truncated=done.finish == "length",
    )


@pytest.mark.fleet
async def test_at_limit_zero_the_fleet_equals_a_plain_loop_bit_for_bit(
    config: Config, forks: Forks, tmp_path: Path, unknown_metrics: Callable[[Mapping[str, object]], list[str]]
) -> None:
    import sys

    used = None if config.fleet.wire == "inproc" else forks  # A run that forks nothing ends what it was given.
    order = RunRequest(config, tmp_path / "run", LineDisplay(sys.stdout, STEPS), "again", forks=used)
    directory = await run(order)
    fleet: list[dict[str, Any]] = [dict(line) for line in read_metrics(directory.metrics)]

    import torch

    torch.set_num_threads(1)
    plain = plain_loop(config, Path(config.model.name))

    assert len(fleet) == len(plain) == STEPS
    compared = (*COMPARED, *OF_A_CRITIC) if config.algorithm.advantage == "gae" else COMPARED
    compared = (*compared, *OF_COSTS) if config.algorithm.constraint == "lagrangian" else compared
    for step, (ours, theirs) in enumerate(zip(fleet, plain, strict=True)):
        different = {name: (ours[name], theirs[name]) for name in compared if ours[name] != theirs[name]}
        assert not different, f"step {step}: {different}"
        assert ours["staleness/max"] == 0
        assert [name for name in METRICS if name not in ours] == unknown_metrics(ours) == []
    assert len({line["reward/mean"] for line in fleet}) > 1
