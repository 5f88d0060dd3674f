"""Pipeline stages: the layers that each rank holds, and how micro-batches run through all of them.

    stage 0    F0  F1  ..  B0  F2  B1  F3 ..      F: forward of a micro-batch, B: its backward
    stage 1        F0  B0  F1  B1  F2 ..          (1F1B; GPipe where there are fewer micro-batches than stages)

The schedules are those of torch.distributed.pipelining. All stages hold the same rows, so that only states and their
gradients are passed on, and each micro-batch is computed in its own shape. torch wants one shape for all that is sent:
the states of the largest micro-batch, flat, with padding behind those of smaller ones. torch makes the buffers for all
micro-batches of a run at once.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from asyncrl.engines.ranks.rank_limits import refusal_of_stages
from asyncrl.engines.ranks.rank_mesh import RankMesh, Ranks
from asyncrl.errors import ConfigError
from asyncrl.lanes.weights.slot_memory import whole_tensor
from asyncrl.protocols.distribute_collect import even_parts

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

# Weights by pipeline stages: a rank keeps those of its own layers, and of the others names and shapes alone.
#
#     first stage    embedding, layers
#     in between     layers
#     last stage     layers, last norm, head
#
# The model, and so the numbering of its weights in an optimizer, is that of one rank: weights of other stages stay
# where they are, on the meta device, which has no memory; their layers pass states on. An embedding that is the head
# too is on the first and on the last stage, which sum its gradients.


class ElsewhereTensor(ABC):
    """Stands for a tensor of which this rank does not hold all, like one that is sharded over ranks. own: what this
    rank holds. shape: of the whole. owner: the stage that gives it to others."""

    def __init__(self, own: Tensor, shape: torch.Size, owner: int = 0) -> None:
        self.own = own
        self.shape = shape
        self.owner = owner

    @abstractmethod
    def to(self, dtype: torch.dtype) -> "ElsewhereTensor":
        """Casts what this rank holds."""

    @abstractmethod
    def full_tensor(self) -> Tensor:
        """Returns the whole tensor at rank 0; all ranks that hold some of it call this together."""


class StageTensor(ElsewhereTensor):
    """Stands for a tensor that another stage than the first holds. moves: whether `full_tensor` moves it to the first
    stage, or only gathers shards at its owner."""

    def __init__(self, own: Tensor, owner: int, stages: Ranks, *, moves: bool) -> None:
        super().__init__(own, own.shape, owner)
        self._stages = stages
        self._moves = moves

    def to(self, dtype: torch.dtype) -> "StageTensor":
        return StageTensor(self.own.to(dtype), self.owner, self._stages, moves=self._moves)

    def full_tensor(self) -> Tensor:
        whole = whole_tensor(self.own)
        if not self._moves:
            return whole
        at_first = torch.empty(self.shape, dtype=self.own.dtype) if self._stages.rank == 0 else whole
        return self._stages.moved(at_first, self.owner)


def held_tensors(published: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns those of the tensors of a version that this rank holds, or holds parts of."""
    own = {name: each.own if isinstance(each, ElsewhereTensor) else each for name, each in published.items()}
    return {name: each for name, each in own.items() if not each.is_meta}


def owner_of(published: Any) -> int:
    """Returns the stage that gives a tensor of a version to others."""
    return published.owner if isinstance(published, ElsewhereTensor) else 0


@dataclass(frozen=True, eq=False)
class StageWeights:
    """Tells which stage holds each weight. owners: by name; of an embedding that is the head too, the first stage.
    moves: whether this rank gives its weights to rank 0, which ranks with copies of them do not. held: names of those
    that this stage holds."""

    owners: Mapping[str, int]
    stages: Ranks
    moves: bool
    held: frozenset[str]

    def published(self, named: Mapping[str, Tensor]) -> dict[str, Any]:
        """Returns what stands for the tensors of all stages, the same for all names of a tensor."""
        found: dict[int, Any] = {}
        for name, tensor in named.items():
            owner = self.owners[name]
            stands = StageTensor(tensor, owner, self.stages, moves=self.moves) if owner else tensor
            found.setdefault(id(tensor), stands)
        return {name: found[id(tensor)] for name, tensor in named.items()}

    def own(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """Returns those that this stage gives to a checkpoint."""
        return {name: each for name, each in named.items() if self.owners.get(name, 0) == self.stages.rank}

    def collected(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns at rank 0 the tensors of all stages in the memory of the host, the first one's where several have the
        same name; at other ranks those that it was given."""
        found = dict(tensors)
        if not self.moves:
            return found
        described = [[name, list(each.shape), str(each.dtype).removeprefix("torch.")] for name, each in tensors.items()]
        for source in range(1, self.stages.size):
            for name, shape, dtype in self.stages.told(described, source):
                if self.stages.rank == source:
                    self.stages.moved(tensors[name], source)
                elif self.stages.rank == 0:
                    moved = self.stages.moved(torch.empty(shape, dtype=getattr(torch, dtype)), source)
                    found.setdefault(name, moved)
        return found

    def collected_states(self, states: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns the states of the parts of an optimizer, at rank 0 with those of all stages."""
        flat = {
            f"{part} {number} {key}": tensor
            for part, state in enumerate(states)
            for number, values in state["state"].items()
            for key, tensor in values.items()
        }
        merged: list[dict[str, Any]] = [{**state, "state": {}} for state in states]
        for path, tensor in self.collected(flat).items():
            part, number, key = path.split(" ")
            merged[int(part)]["state"].setdefault(int(number), {})[key] = tensor
        return merged


def keep_stage(whole: Any, mesh: RankMesh) -> StageWeights:
    """Gives up the weights of other stages in a transformers model. Raises ConfigError for a model of another family,
    or with fewer layers than stages."""
    held = _modules_of_stages(whole, mesh.stages.size)
    owners: dict[int, int] = {}
    for stage, modules in enumerate(held):
        for parameter in nn.ModuleList(modules).parameters():
            owners.setdefault(id(parameter), stage)
    named = list(whole.named_parameters(remove_duplicate=False))
    by_name = {name: owners[id(parameter)] for name, parameter in named}
    kept = {id(parameter) for parameter in nn.ModuleList(held[mesh.stages.rank]).parameters()}
    names = frozenset(name for name, parameter in named if id(parameter) in kept)
    _give_up(whole, kept)
    for stage, modules in enumerate(held):
        for module in modules if stage != mesh.stages.rank else ():
            module.forward = _passed_on
    return StageWeights(by_name, mesh.stages, mesh.gathers, names)


def _modules_of_stages(whole: Any, stages: int) -> list[list[Any]]:
    """Returns the modules of each stage, about as many layers in each, the longer parts first."""
    if refusal := refusal_of_stages(whole.config.to_dict(), stages):
        raise ConfigError(f"training.layout: {refusal}")
    body = whole.base_model
    found = [[body.layers[index] for index in part] for part in even_parts([1] * len(body.layers), stages)]
    found[0].insert(0, body.embed_tokens)
    found[-1] += [body.norm, whole.get_output_embeddings()]
    return found


def _passed_on(states: Tensor, *_: Any, **__: Any) -> Tensor:
    return states


def _give_up(whole: nn.Module, kept: set[int]) -> None:
    """Puts parameters on the meta device, but for those kept; one parameter under several names stays one."""
    replaced: dict[int, nn.Parameter] = {}
    for module in whole.modules():
        for name, each in list(module.named_parameters(recurse=False)):
            if id(each) in kept:
                continue
            if id(each) not in replaced:
                replaced[id(each)] = nn.Parameter(each.detach().to("meta"), requires_grad=each.requires_grad)
            setattr(module, name, replaced[id(each)])


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
