"""AdamW on float32 master weights: schedule, clipping, and no step on a gradient that is not finite."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from asyncrl.config import Training
from asyncrl.engines.training.ranks import Ranks, sum_gradients


def descend(optimizer: "Optimizer", ranks: Ranks, *, finite: bool) -> float | None:
    """One optimizer step on the gradients of all ranks, each of which had a `finite` loss; answers with their norm, or
    None: then no weight has changed, on any rank."""
    broken = ranks.largest(torch.tensor([0.0 if finite else 1.0]))
    norm = None
    if not broken.item():
        sum_gradients(ranks, optimizer.parameters)
        norm = optimizer.step()
    optimizer.zero()
    return norm


def learning_rate(settings: Training, update: int, total: int) -> float:
    """Rate of optimizer step `update` (0 is the first) of `total`: linear warm-up, then constant, or falling to
    zero linearly or as half a cosine."""
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
    """updates: optimizer steps taken since the start of the run, over all epochs; total: as planned."""

    settings: Training
    parameters: list[nn.Parameter]
    total: int
    updates: int
    adamw: torch.optim.AdamW

    @classmethod
    def of(cls, model: nn.Module, settings: Training, total: int) -> "Optimizer":
        """Weight decay on matrices only."""
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
        """Learning rate of the last step."""
        rate: float = self.adamw.param_groups[0]["lr"]
        return rate

    def zero(self) -> None:
        self.adamw.zero_grad(set_to_none=True)

    def step(self) -> float | None:
        """One optimizer step on the gradients summed so far; answers with their norm before clipping, or None
        when it is not finite: then nothing has changed."""
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
