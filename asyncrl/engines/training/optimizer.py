"""AdamW on float32 master weights: schedule, gradient clipping, and no step on a gradient that is not finite."""

import math
from typing import Any

import torch

from asyncrl.config.schema import TrainingConfig
from asyncrl.engines.training.ranks.gradients import clip_gradients, sum_gradients
from asyncrl.engines.training.ranks.rank_mesh import RankMesh


class Optimizer:
    """Wraps AdamW with weight decay on matrices only. updates: optimizer steps since the start of the run, over all
    incarnations. rate: of the last of them."""

    def __init__(self, model: Any, settings: TrainingConfig, steps: int) -> None:
        """Puts a transformers model into training mode, for a run of `steps` iterations."""
        model.train()
        if settings.gradient_checkpointing:
            # transformers renamed the method within the range of versions that the package accepts.
            renamed = hasattr(model, "activation_checkpointing_enable")
            enable = model.activation_checkpointing_enable if renamed else model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        self.settings = settings
        self.updates = 0
        self.rate = settings.learning_rate
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self._planned = steps * settings.updates
        assert all(p.dtype == torch.float32 for p in self.parameters), "master weights are float32"
        groups = [
            {"params": [p for p in self.parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
            {"params": [p for p in self.parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, fused=True)

    def step(self, mesh: RankMesh, *, finite: bool) -> float | None:
        """Takes one step on the accumulated gradients of all ranks, and returns their norm before clipping; None, with
        no weight changed on any rank, when it or a loss is not finite. finite: the losses of all ranks were finite."""
        norm = math.inf
        if finite:
            sum_gradients(mesh, self.parameters)
            norm = clip_gradients(mesh, self.parameters, self.settings.max_grad_norm)
        if math.isfinite(norm):
            self.rate = learning_rate(self.settings, self.updates, self._planned)
            for group in self.adamw.param_groups:
                group["lr"] = self.rate
            self.adamw.step()
            self.updates += 1
        self.discard()
        return norm if math.isfinite(norm) else None

    def discard(self) -> None:
        """Drops the accumulated gradients."""
        self.adamw.zero_grad(set_to_none=True)


def learning_rate(settings: TrainingConfig, update: int, total: int) -> float:
    """Returns the learning rate of optimizer step `update`, counted from 0, of `total`. The schedule warms up linearly,
    then stays constant or decays to zero, linearly or as half a cosine."""
    warm = settings.warmup_steps * settings.updates
    if update < warm:
        return settings.learning_rate * (update + 1) / (warm + 1)
    if settings.schedule == "constant":
        return settings.learning_rate
    done = min(1.0, (update - warm) / max(1, total - warm))
    left = 1 - done if settings.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return settings.learning_rate * left
