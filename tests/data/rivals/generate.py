"""What TRL's and verl's own functions answer on random, ragged input: writes values.json beside this script.

Runs in an environment of its own, never in that of the package:

    pip install torch==2.13.0 numpy==2.4.6 trl==1.16.0 tensordict==0.15.3 omegaconf ray==2.60.0 codetiming orjson
    pip install --no-deps verl==0.9.1
    python tests/data/rivals/generate.py

Lengths are 9, 1, 4, 7, 2, 5 and 0 of 9 places. Groups are 0 0 0 1 1 2 2, and one with a single member for advantages.
Every loss is stored with its gradient in the current log-probs.
"""

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from trl import GRPOTrainer
from trl.experimental.gmpo import GMPOTrainer
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.workers.config import ActorConfig

LENGTHS = (9, 1, 4, 7, 2, 5, 0)
WIDTH = 9
BOUNDS = {"clip_low": 0.2, "clip_high": 0.28}
DUAL = 3.0

draw = np.random.default_rng(20261121)
MASK = torch.tensor([[float(place < length) for place in range(WIDTH)] for length in LENGTHS], dtype=torch.float64)


def table(mean: float, spread: float) -> torch.Tensor:
    return torch.tensor(draw.normal(mean, spread, (len(LENGTHS), WIDTH)), dtype=torch.float64)


CURRENT = table(-1.5, 0.6)
OLD = CURRENT + table(0.0, 0.35)
BEHAVIOUR = OLD + table(0.0, 0.3)
REFERENCE = CURRENT + table(0.0, 0.5)
ADVANTAGES = torch.tensor(draw.normal(0, 1, len(LENGTHS)), dtype=torch.float64)
OLD[0, 0], OLD[3, 2] = CURRENT[0, 0] - 1.6, CURRENT[3, 2] + 1.6  # beyond every bound, the dual clip's too
ADVANTAGES[0] = -abs(ADVANTAGES[0])


def with_gradient(loss_of: Any) -> dict[str, Any]:
    current = CURRENT.clone().requires_grad_()
    loss = loss_of(current)
    (gradient,) = torch.autograd.grad(loss, current)
    return {"loss": loss.item(), "gradient": (gradient * MASK).tolist()}


# ---- verl ------------------------------------------------------------------------------------------------


def actor(low: float, high: float, **more: Any) -> ActorConfig:
    base = {"strategy": "fsdp", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1}
    return ActorConfig(**base, clip_ratio=low, clip_ratio_low=low, clip_ratio_high=high, **more)


def verl_loss(name: str, mode: str, low: float, high: float, **more: Any) -> dict[str, Any]:
    function = core_algos.get_policy_loss_fn(name)
    advantages = ADVANTAGES[:, None].expand_as(MASK)
    return with_gradient(lambda lp: function(OLD, lp, advantages, MASK, mode, actor(low, high, **more))[0])


def verl_losses() -> dict[str, Any]:
    low, high = BOUNDS.values()
    modes = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
    return {
        **{f"clip {mode}": verl_loss("vanilla", mode, low, high, clip_ratio_c=DUAL) for mode in modes},
        "gspo": verl_loss("gspo", "seq-mean-token-mean", low, high),
        "cispo": verl_loss("cispo", "token-mean", low, high),
        "gmpo": verl_loss("geo_mean", "token-mean", 0.4, 0.4),
        "sapo": verl_loss("sapo", "seq-mean-token-mean", low, high),
    }


def verl_kl() -> dict[str, Any]:
    return {k: core_algos.kl_penalty_forward(CURRENT, REFERENCE, k).tolist() for k in ("k1", "k2", "k3")}


def verl_controller() -> list[float]:
    controller = core_algos.AdaptiveKLController(0.05, 0.1, 10)
    values = []
    for measured in (0.3, 0.11, 0.1, 0.05, -0.02, 0.099):
        controller.update(measured, 1)
        values.append(float(controller.value))
    return values


GROUPS = np.array([0, 0, 0, 1, 1, 2, 2, 3])
REWARDS = [0.25, 1.0, -0.5, 0.3, 0.3, 2.0, 0.0, 0.7]
TOKENS = (9, 1, 4, 7, 2, 5, 3, 6)
GREEDY = [0.5, 0.3, -1.0, 0.9]


def verl_advantages() -> dict[str, Any]:
    mask = torch.tensor([[float(p < n) for p in range(WIDTH)] for n in TOKENS], dtype=torch.float64)
    rewards = torch.zeros_like(mask)
    for row, (length, reward) in enumerate(zip(TOKENS, REWARDS, strict=True)):
        rewards[row, length - 1] = reward
    made = {
        "group_mean": core_algos.compute_grpo_outcome_advantage(rewards, mask, GROUPS, norm_adv_by_std_in_grpo=False),
        "group_std": core_algos.compute_grpo_outcome_advantage(rewards, mask, GROUPS),
        "leave_one_out": core_algos.compute_rloo_outcome_advantage(rewards, mask, GROUPS),
        "batch": core_algos.compute_reinforce_plus_plus_outcome_advantage(
            rewards, mask, config=SimpleNamespace(gamma=1.0)
        ),
        "group_batch": core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(rewards, mask, GROUPS),
        "greedy": core_algos.compute_remax_outcome_advantage(
            rewards, torch.tensor(GREEDY, dtype=torch.float64)[torch.tensor(GROUPS)], mask
        ),
    }
    return {name: advantages[:, 0].tolist() for name, (advantages, _) in made.items()}


judging = np.random.default_rng(20261122)
JUDGED = torch.tensor(judging.normal(0.2, 0.5, MASK.shape), dtype=torch.float64)
PREDICTED = JUDGED + torch.tensor(judging.normal(0, 0.3, MASK.shape), dtype=torch.float64)
GAMMA = 0.97
GAE_LAMBDA = 0.9
KL = 0.1
VALUE_CLIP = 0.2


def verl_critic() -> dict[str, Any]:
    """The advantages above are the rewards here, on the last tokens, with a KL on each."""
    rewards = -KL * (BEHAVIOUR - REFERENCE) * MASK
    for row, length in enumerate(LENGTHS):
        if length:
            rewards[row, length - 1] += ADVANTAGES[row]
    advantages, returns = core_algos.compute_gae_advantage_return(rewards, JUDGED, MASK, GAMMA, GAE_LAMBDA)
    predicted = PREDICTED.clone().requires_grad_()
    loss, held = core_algos.compute_value_loss(predicted, returns, JUDGED, MASK, VALUE_CLIP)
    (gradient,) = torch.autograd.grad(loss, predicted)
    return {
        "settings": {"gamma": GAMMA, "gae_lambda": GAE_LAMBDA, "kl": KL, "value_clip": VALUE_CLIP},
        "judged": JUDGED.tolist(),
        "predicted": PREDICTED.tolist(),
        "advantages": (advantages * MASK).tolist(),
        "returns": (returns * MASK).tolist(),
        "loss": loss.item(),
        "held": held.item(),
        "gradient": (gradient * MASK).tolist(),
    }


def verl_corrections() -> dict[str, Any]:
    log_ratio = (OLD - BEHAVIOUR) * MASK
    weights = rollout_corr_helper.compute_rollout_correction_weights
    rejection = rollout_corr_helper.compute_rollout_rejection_mask
    made = {
        f"{kind} {level}": weights(log_ratio, MASK, level, threshold)[0]
        for level in ("token", "sequence")
        for kind, threshold in (("cap", 1.2), ("mask", "0.8_1.25"))
    }
    for option, threshold in (
        ("seq_mean_k1", "0.9_1.111111111111111"),
        ("token_k2", "0.05"),
        ("token_k3", "0.05"),
        ("seq_mean_k2", "0.05"),
        ("seq_mean_k3", "0.05"),
    ):
        made[option] = rejection(log_ratio, MASK, option, threshold)[0]
    return {name: (values * MASK).tolist() for name, values in made.items()}


# ---- TRL -------------------------------------------------------------------------------------------------


class Alone:
    """An accelerator of one process."""

    num_processes = 1
    sync_gradients = True

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def reduce(self, values: torch.Tensor, reduction: str = "sum") -> torch.Tensor:
        return values


def trl_self(current: torch.Tensor, **changes: Any) -> SimpleNamespace:
    """What `_compute_loss` reads of a trainer."""
    settings = SimpleNamespace(
        delta=None, use_bias_correction_kl=False, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05
    )
    values = {
        "_get_per_token_logps_and_entropies": lambda *a, **k: (current, torch.zeros_like(current), None),
        "_metrics": {"train": defaultdict(list), "eval": defaultdict(list)},
        "accelerator": Alone(),
        "args": settings,
        "aux_loss_enabled": False,
        "beta": 0.0,
        "current_gradient_accumulation_steps": 1,
        "epsilon_low": BOUNDS["clip_low"],
        "epsilon_high": BOUNDS["clip_high"],
        "importance_sampling_level": "token",
        "loss_type": "grpo",
        "max_completion_length": WIDTH,
        "model": SimpleNamespace(training=False),
        "off_policy_mask_threshold": None,
        "top_entropy_quantile": 1.0,
        "use_vllm": False,
        "vllm_importance_sampling_correction": False,
        "_entropy_bonus_enabled": False,
    }
    delta = changes.pop("delta", None)
    settings.delta = delta
    return SimpleNamespace(**{**values, **changes})


def trl_loss(trainer: Any = GRPOTrainer, **changes: Any) -> dict[str, Any]:
    ids = torch.zeros(len(LENGTHS), WIDTH, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": torch.ones_like(ids[:, :1]),
        "completion_ids": ids,
        "completion_mask": MASK,
        "advantages": ADVANTAGES,
        "old_per_token_logps": OLD,
        "ref_per_token_logps": REFERENCE,
        "num_items_in_batch": MASK.sum(),
    }
    return with_gradient(lambda lp: trainer._compute_loss(trl_self(lp, **changes), None, inputs))


def trl_losses() -> dict[str, Any]:
    return {
        "clip token_mean": trl_loss(loss_type="dapo"),
        "clip sequence_mean_token_mean": trl_loss(),
        "clip constant": trl_loss(loss_type="dr_grpo"),
        "gspo": trl_loss(importance_sampling_level="sequence"),
        "cispo": trl_loss(loss_type="cispo", epsilon_high=1 + BOUNDS["clip_high"]),
        "sapo": trl_loss(loss_type="sapo"),
        "gmpo": trl_loss(GMPOTrainer, epsilon_low=0.4, epsilon_high=0.4),
        "kl": trl_loss(beta=0.1),
        "two-sided": trl_loss(delta=DUAL),
    }


def main() -> None:
    named = {"current": CURRENT, "old": OLD, "behaviour": BEHAVIOUR, "reference": REFERENCE, "advantages": ADVANTAGES}
    values = {
        "lengths": LENGTHS,
        **{name: values.tolist() for name, values in named.items()},
        "bounds": BOUNDS,
        "dual": DUAL,
        "groups": GROUPS.tolist(),
        "rewards": REWARDS,
        "tokens": TOKENS,
        "greedy": GREEDY,
        "verl": {
            "losses": verl_losses(),
            "kl": verl_kl(),
            "controller": verl_controller(),
            "advantages": verl_advantages(),
            "critic": verl_critic(),
            "corrections": verl_corrections(),
        },
        "trl": {"losses": trl_losses()},
    }
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in values.items())
    Path(__file__).with_name("values.json").write_text("{\n" + lines + "\n}\n")


if __name__ == "__main__":
    main()
