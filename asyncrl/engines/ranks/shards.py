"""Weights that ranks share out by FSDP2, and the parts of weights and moments that each rank writes into a checkpoint.

    forward     layer by layer: gather its weights, compute, free them
    backward    the same from the last layer on, and each rank keeps the sum of its part of the layer's gradient
    optimizer   each rank its parts

All ranks run the same passes, because each gathers from all (`RankMesh.in_step`). Gradients are summed after each pass,
so that no rank holds a gradient of all weights.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from asyncrl.engines.models.tensor_parts import Kind, StoredTensor, TensorPart
from asyncrl.engines.ranks.pipeline import StageWeights
from asyncrl.engines.ranks.rank_mesh import RankMesh
from asyncrl.errors import ConfigError, JournalError
from asyncrl.lanes.weights.slot_memory import whole_tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

Found = TypeVar("Found")


class PassRoot(nn.Module):
    """Runs computations with the weights outside of layers, embedding, last norm and head, which are one part of the
    sharded model: gathered as the computation begins, and for its backward pass."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.whole = whole

    def forward(self, compute: Callable[[], Found]) -> Found:
        return compute()


def shard_model(whole: Any, mesh: DeviceMesh, device: torch.device, key: str) -> PassRoot:
    """Shares out the weights of a transformers model on a device, or without memory yet, over the mesh. key: of the
    layout in the config. Raises ConfigError when torch is too old, or ranks exchange on another kind of device."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    if not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
        raise ConfigError(f"{key}: shard needs torch 2.9 or newer, and {torch.__version__} is installed")
    refuse_shared_gpu(device, mesh, key, "shard")
    root = PassRoot(whole)
    layers = [each for each in whole.modules() if type(each).__name__ in (whole._no_split_modules or ())]
    for module in (*layers, root):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # Each rank has divided by the denominators of all.
            module.set_force_sum_reduction_for_comms(True)
    return root


def refuse_shared_gpu(device: torch.device, mesh: DeviceMesh, key: str, axis: str) -> None:
    """Raises ConfigError when weights belong on another kind of device than ranks exchange on. key: of the layout."""
    if device.type != mesh.device_type:
        raise ConfigError(
            f"{key}: ranks of {axis} on {device.type} need a GPU of their own each: lower {axis}, or give "
            f"{key.partition('.')[0]} a pool with as many devices"
        )


def own_part(tensor: Tensor) -> Tensor:
    """Returns the part of a tensor that this rank holds, without a copy."""
    return tensor.to_local() if is_part(tensor) else tensor


def gather_state(state: Any, *, keep: bool = True, copy: bool = True) -> Any:
    """Returns the state of an optimizer, or of a model, with whole tensors in the memory of the host; each tensor that
    stands there twice is gathered once. keep: False returns nothing, and only takes part in gathering. copy: a tensor
    that is whole is copied, so that the next step does not change it."""
    found: dict[int, Tensor] = {}

    def gathered(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: gathered(each) for name, each in value.items()}
        if isinstance(value, list):
            return [gathered(each) for each in value]
        if not isinstance(value, Tensor):
            return value
        if id(value) not in found:
            whole = whole_tensor(value.detach()) if is_part(value) else value.detach()
            kept = torch.empty(0) if not keep else whole.to("cpu", copy=copy and not is_part(value))
            found[id(value)] = kept
        return found[id(value)]

    state = gathered(state)
    return state if keep else None


def is_part(tensor: Any) -> TypeGuard["DTensor"]:
    """Returns whether this rank may hold a part of the tensor only. A process that never imported DTensor, which takes
    a while, has no such tensor."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)  # Another thread may be importing it.
    return kind is not None and isinstance(tensor, kind)


def is_split(tensor: Tensor) -> bool:
    """Returns whether tensor ranks hold different parts of it."""
    return "tp" in axes_cut(tensor)


def is_of_experts(tensor: Tensor) -> bool:
    """Returns whether ranks hold different experts of it."""
    return "ep" in axes_cut(tensor)


def cut_dim(tensor: Tensor) -> int:
    """Returns the dimension along which tensor ranks cut a tensor that is split."""
    assert is_part(tensor), "it is split"
    dim = _cut(tensor.placements[_axis_of_layers(tensor)])
    assert dim is not None, "it is split"
    return dim


def _axis_of_layers(tensor: "DTensor") -> int:
    """Returns the axis of the mesh of a tensor along which layers are split."""
    names = tensor.device_mesh.mesh_dim_names
    assert names is not None, "every mesh has names"
    return names.index("tp")


def share_out(value: Tensor | StoredTensor, like: Tensor) -> Tensor:
    """Returns in memory of its own the part of a whole tensor that this rank holds, as `like` is shared out."""
    has_parts = is_part(like) and value.dim() == like.dim()
    part = value[own_ranges(like) if has_parts else tuple(slice(0, size) for size in value.shape)]
    return part.clone() if isinstance(value, Tensor) else part


def rows_of_shards(tensor: Tensor) -> int:
    """Returns the rows that shards of a tensor hold together: those of this tensor rank."""
    if not (is_part(tensor) and is_split(tensor) and cut_dim(tensor) == 0):
        return len(tensor)
    mesh = tensor.device_mesh
    axis = _axis_of_layers(tensor)
    part = -(-len(tensor) // mesh.size(axis))
    return min(part, len(tensor) - part * mesh.get_local_rank(axis))


def own_ranges(tensor: Tensor) -> tuple[slice, ...]:
    """Returns where the part of this rank begins and ends in each dimension: layers are split first, and shards are
    parts of what is left."""
    ranges = [slice(0, size) for size in tensor.shape]
    if not is_part(tensor):
        return tuple(ranges)
    mesh = tensor.device_mesh
    for axis in reversed(range(mesh.ndim)):
        if (dim := _cut(tensor.placements[axis])) is not None:
            start = ranges[dim].start
            stop = ranges[dim].stop
            size = -(
                -(stop - start) // mesh.size(axis)
            )  # As torch.chunk does: the last parts may have less, or nothing.
            begin = min(stop, start + size * mesh.get_local_rank(axis))
            ranges[dim] = slice(begin, min(stop, begin + size))
    return tuple(ranges)


def axes_cut(tensor: Tensor) -> set[str]:
    """Returns the axes of the mesh (dp, shard, ep, tp) along which ranks hold different parts of a tensor."""
    if not is_part(tensor):
        return set()
    names = tensor.device_mesh.mesh_dim_names or ()
    return {name for name, place in zip(names, tensor.placements, strict=True) if _cut(place) is not None}


def as_part_of(part: Tensor, like: Tensor) -> Tensor:
    """Returns the part of this rank as a part of a whole tensor that is shared out as `like` is."""
    if not is_part(like) or part.dim() != like.dim():
        return part
    from torch.distributed.tensor import DTensor

    options: dict[str, Any] = {"run_check": False, "shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(part, like.device_mesh, like.placements, **options)


def _cut(placement: "Placement") -> int | None:
    """Returns the dimension along which a placement cuts; None where ranks hold the same."""
    dim: int | None = getattr(placement, "dim", None)
    return dim


# The parts of weights and moments that a rank writes into a checkpoint, and takes from one: each is written once.
#
# Of ranks that hold the same, the first one along each axis writes: a norm that tensor ranks hold whole, shards of
# which dp has copies, an embedding that is the head of the last pipeline stage too.


Parts = Mapping[Kind, Mapping[str, TensorPart]]
NO_PARTS: Parts = {}


class OptimizerStates(Protocol):
    """The states of an optimizer: whole or as parts, tensor by tensor, or without tensors."""

    def states(self) -> list[dict[str, Any]]: ...

    def state_tensors(self) -> Iterable[tuple[str, Tensor, Tensor]]: ...

    def settings_of_states(self) -> list[dict[str, Any]]: ...


@dataclass(frozen=True, eq=False)
class HeldModel:
    """Holds the parts of a transformers model that one rank has. stage: where it has some of the layers alone."""

    whole: Any
    stage: StageWeights | None
    mesh: RankMesh

    def copied(
        self, optimizer: OptimizerStates, named: Mapping[str, Tensor] | None, *, copy: bool
    ) -> tuple[Parts, Mapping[str, Tensor] | None, list[dict[str, Any]]]:
        """Returns the parts that this rank writes, with states that hold no moments; or, where no rank has parts, no
        parts, and weights and states of the optimizer. named: weights that are gathered in any case; None: all. All
        ranks call it together."""
        if named is None and self.mesh.is_parted:
            return self.parts(optimizer.state_tensors(), copy=copy), None, optimizer.settings_of_states()
        whole = self.whole.state_dict(keep_vars=True) if named is None else named
        return NO_PARTS, *self.gathered(whole, optimizer.states(), copy=copy)

    def published(self, named: Mapping[str, Tensor]) -> dict[str, Any]:
        """Returns the tensors of a version, and for those that this rank does not hold what stands for them. named: the
        weights of the model, tied ones under every name."""
        return dict(named) if self.stage is None else self.stage.published(named)

    def parts(self, states: Iterable[tuple[str, Tensor, Tensor]], *, copy: bool) -> Parts:
        """Returns the parts that this rank writes. states: of the optimizer, each with name and weight. copy: in the
        memory of the host, so that the next step does not change them."""
        named = dict(_weights(self.whole))
        own = named if self.stage is None else self.stage.own(named)
        written = set(map(id, own.values()))
        moments = ((name, tensor) for name, tensor, weight in states if id(weight) in written)
        return {"weights": self._parts(own.items(), copy=copy), "moments": self._parts(moments, copy=copy)}

    def gathered(
        self, weights: Mapping[str, Tensor], states: list[dict[str, Any]], *, copy: bool
    ) -> tuple[Mapping[str, Tensor] | None, list[dict[str, Any]]]:
        """Returns weights and states of the optimizer with whole tensors, at the ranks that rank 0 gets them from; at
        others nothing of use. All ranks call it together."""
        how = {"keep": self.mesh.gathers, "copy": copy}
        stage = self.stage
        whole = gather_state(weights if stage is None else stage.own(weights), **how)
        found = gather_state(states, **how)
        if stage is None or not self.mesh.gathers:
            return whole, found
        return stage.collected(whole), stage.collected_states(found)

    def _parts(self, named: Iterable[tuple[str, Tensor]], *, copy: bool) -> dict[str, TensorPart]:
        found: dict[str, TensorPart] = {}
        mesh = self.mesh
        for name, tensor in named:
            copies = mesh.expert_copies if is_of_experts(tensor) else mesh.copies
            ranks = {"dp": copies.rank, "shard": mesh.shards.rank, "tp": mesh.tensor.rank}
            if any(rank for axis, rank in ranks.items() if axis not in axes_cut(tensor)):
                continue
            part = own_part(tensor.detach())
            if part.numel():
                values = part.to("cpu", copy=True) if copy else part
                found[name] = TensorPart(values, tuple(each.start for each in own_ranges(tensor)))
        return found

    @torch.no_grad()
    def fill(
        self, stored: Mapping[str, StoredTensor], device: torch.device, zeros: frozenset[str] = frozenset()
    ) -> None:
        """Gives the parts of this rank memory on a device, and the values of `stored`, or 0. Parameters that have
        memory, those of adapters, keep their values. Raises JournalError when one is missing or does not fit."""
        had_memory = self._allocate(device)
        for name, tensor in _weights(self.whole):
            if tensor.is_meta or id(tensor) in had_memory:  # Another stage has what has no memory now.
                continue
            if name in zeros:
                own_part(tensor.detach()).zero_()
                continue
            shape = tuple(tensor.shape)
            if name not in stored or stored[name].shape != shape:
                found = stored[name].shape if name in stored else "nothing"
                raise JournalError(f"{name} has shape {shape}, and the parts of the checkpoint hold {found}")
            self._fill(tensor, stored[name])

    def _fill(self, tensor: Tensor, stored: StoredTensor) -> None:
        """Takes this rank's part of a weight from the files."""
        own_part(tensor.detach()).copy_(share_out(stored, tensor))

    def _allocate(self, device: torch.device) -> set[int]:
        """Gives the parts of this rank memory on the device, or moves them there; a tensor of two modules stays one.
        Returns the ids of parameters that had memory."""
        made: dict[int, nn.Parameter] = {}
        had_memory: set[int] = set()
        for prefix, module in self.whole.named_modules():
            for name, each in list(module.named_parameters(recurse=False)):
                if self.stage is not None and f"{prefix}.{name}" not in self.stage.held:
                    continue
                if id(each) not in made:
                    made[id(each)] = each if each.device == device else _moved(each, device)
                setattr(module, name, made[id(each)])
                had_memory |= set() if each.is_meta else {id(made[id(each)])}
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))
        return had_memory


def _moved(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    values = torch.empty_like(parameter, device=device) if parameter.is_meta else parameter.detach().to(device)
    return nn.Parameter(values, parameter.requires_grad)


def _weights(whole: Any) -> Iterable[tuple[str, Tensor]]:
    """Yields weights and buffers that are saved, tied ones under the first of their names."""
    seen: set[int] = set()
    for name, tensor in whole.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor
