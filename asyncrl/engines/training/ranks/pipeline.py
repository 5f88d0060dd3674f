"""Runs micro-batches through the stages of a pipeline, by the schedules of torch.distributed.pipelining.

    stage 0    F0  F1  ..  B0  F2  B1  F3 ..      F: forward of a micro-batch, B: its backward
    stage 1        F0  B0  F1  B1  F2 ..          (1F1B; GPipe where there are fewer micro-batches than stages)

All stages hold the same rows, so that only states and their gradients are passed on, and each micro-batch is computed
in its own shape. torch wants one shape for all that is sent: the states of the largest micro-batch, flat, with padding
behind those of smaller ones. torch makes the buffers for all micro-batches of a run at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from asyncrl.engines.training.ranks.rank_mesh import RankMesh
from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

Body = Callable[[int, Tensor | None], Tensor]
"""Maps number of a micro-batch, and the states [tokens, width] of the stage before, None at the first, to states."""
Ending = Callable[[int, Tensor], Tensor]
"""Maps number and last states of a micro-batch to its loss, or keeps what is wanted of them and returns any number."""


@dataclass(frozen=True, eq=False)
class PipelineRank:
    """Runs the stage of this rank. width: of the states. device: that the states are sent from."""

    mesh: RankMesh
    width: int
    device: torch.device

    @classmethod
    def of(cls, mesh: RankMesh, width: int, device: torch.device) -> "PipelineRank":
        """Raises ConfigError for a GPU that ranks cannot exchange on."""
        if mesh.piping is not None and device.type != "cpu" and torch.distributed.get_backend(mesh.piping) == "gloo":
            raise ConfigError(
                f"training.layout: pipeline stages on {device.type} need a GPU of their own each: lower pp, or give "
                "training a pool with as many devices"
            )
        return cls(mesh, width, device)

    @property
    def is_last(self) -> bool:
        return self.mesh.stages.rank == self.mesh.stages.size - 1

    def from_last(self, values: Tensor) -> Tensor:
        """Returns the values of the last stage on all stages, which give values of the same shape."""
        return self.mesh.stages.shared(values, self.mesh.stages.size - 1)

    def run(self, sizes: Sequence[int], body: Body, ending: Ending, *, backward: bool) -> None:
        """Runs micro-batches of so many tokens; the last stage calls `ending`. backward: from the losses too."""
        from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

        if not sizes:
            return
        stages = self.mesh.stages
        numbers = torch.arange(len(sizes))
        computed = _Stage(sizes, body, ending if self.is_last else None)
        kind = Schedule1F1B if backward and len(sizes) >= stages.size else ScheduleGPipe
        stage = self._stage(computed, max(sizes), backward=backward)
        schedule = kind(stage, len(sizes), _loss if backward else None, scale_grads=False)
        with torch.set_grad_enabled(backward):
            if stages.rank == 0:
                schedule.step(numbers)
            else:
                schedule.step(target=numbers if self.is_last and backward else None, number=numbers)

    def _stage(self, computed: "_Stage", tokens: int, *, backward: bool) -> "PipelineStage":
        """Describes to torch what the stage is given and returns: it would ask other stages by pickled messages."""
        from torch.distributed.pipelining import PipelineStage

        stages = self.mesh.stages
        states = torch.empty((tokens, self.width), device="meta", requires_grad=backward)
        given = torch.empty(1, dtype=torch.int64, device="meta") if stages.rank == 0 else states
        returned = torch.empty(1, device="meta", requires_grad=backward) if self.is_last else states
        place = (stages.rank, stages.size, self.device)
        return PipelineStage(computed, *place, given, returned, group=self.mesh.piping)


class _Stage(nn.Module):
    """Computes what a stage does, as torch's pipelining calls it. ending: at the last stage."""

    def __init__(self, sizes: Sequence[int], body: Body, ending: Ending | None) -> None:
        super().__init__()
        self._sizes = sizes
        self._body = body
        self._ending = ending

    def forward(self, given: Tensor, number: Tensor | None = None) -> Tensor:
        """Computes one micro-batch. given: its number at the first stage, which has no other argument, else states."""
        index = int((given if number is None else number).item())
        size = self._sizes[index]
        states = self._body(index, None if number is None else given[:size])
        if self._ending is not None:
            return self._ending(index, states).reshape(1)
        if torch.is_grad_enabled() and not states.requires_grad:  # Nothing before learns, and torch wants a gradient.
            states.requires_grad_()
        return nn.functional.pad(states, (0, 0, 0, max(self._sizes) - size))


def _loss(loss: Tensor, _: Tensor) -> Tensor:
    return loss.sum()
