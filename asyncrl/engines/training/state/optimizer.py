"""AdamW on float32 master weights: schedule, gradient clipping, and no step on a gradient that is not finite."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from asyncrl.config.schema import TrainingConfig
from asyncrl.engines.training.state.data_parallel import Ranks, sum_gradients


def optimizer_step(optimizer: "Optimizer", ranks: Ranks, *, finite: bool) -> float | None:
    """Takes one optimizer step on the gradients of all ranks, and returns their norm before clipping.

    finite: the loss of this rank was finite. Returns None, with no weight changed on any rank, when a loss or the norm
    is not finite.
    """
    any_broken = ranks.largest(torch.tensor([0.0 if finite else 1.0]))
    norm = None
    if not any_broken.item():
        sum_gradients(ranks, optimizer.parameters)
        norm = optimizer.step()
    optimizer.zero()
    return norm


def learning_rate(settings: TrainingConfig, update: int, total: int) -> float:
    """Returns the learning rate of optimizer step `update`, counted from 0, of `total`.

    The schedule warms up linearly, then stays constant or decays to zero, linearly or as half a cosine.
    """
    warm = settings.warmup_steps * settings.updates
    if update < warm:
        return settings.learning_rate * (update + 1) / (warm + 1)
    if settings.schedule == "constant":
        return settings.learning_rate
    done = min(1.0, (update - warm) / max(1, total - warm))
    left = 1 - done if settings.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return settings.learning_rate * left


@dataclass(slots=True)
class Optimizer:
    """Wraps AdamW. updates: optimizer steps since the start of the run, over all incarnations. total: planned steps."""

    settings: TrainingConfig
    parameters: list[nn.Parameter]
    total: int
    updates: int
    adamw: torch.optim.AdamW

    @classmethod
    def of(cls, model: nn.Module, settings: TrainingConfig, total: int) -> "Optimizer":
        """Builds AdamW with weight decay on matrices only."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        assert all(p.dtype == torch.float32 for p in parameters), "master weights are float32"
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        adamw = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, fused=True)
        return cls(settings, parameters, total, 0, adamw)

    @property
    def rate(self) -> float:
        """Returns the learning rate of the last step."""
        rate: float = self.adamw.param_groups[0]["lr"]
        return rate

    def zero(self) -> None:
        self.adamw.zero_grad(set_to_none=True)

    def step(self) -> float | None:
        """Takes a step on the accumulated gradients and returns their norm before clipping.

        Returns None, with nothing changed, when the norm is not finite.
        """
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self.settings.max_grad_norm))
        if not math.isfinite(norm):
            return None
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate(self.settings, self.updates, self.total)
        self.adamw.step()
        self.updates += 1
        return norm

    def state(self) -> dict[str, Any]:
        return {"adamw": self.adamw.state_dict(), "updates": self.updates}

    def restore(self, state: dict[str, Any]) -> None:
        self.adamw.load_state_dict(state["adamw"])
        self.updates = state["updates"]


def training_optimizer(model: Any, settings: TrainingConfig, steps: int) -> Optimizer:
    """Puts a transformers model into training mode and returns its optimizer for a run of `steps` iterations."""
    model.train()
    if settings.gradient_checkpointing:
        # transformers renamed the method within the range of versions that the package accepts.
        renamed = hasattr(model, "activation_checkpointing_enable")
        enable = model.activation_checkpointing_enable if renamed else model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return Optimizer.of(model, settings, steps * settings.updates)
