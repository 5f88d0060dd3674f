"""The parts of weights and moments that a rank writes into a checkpoint, and takes from one: each is written once.

Of ranks that hold the same, the first one along each axis writes: a norm that tensor ranks hold whole, shards of which
dp has copies, an embedding that is the head of the last pipeline stage too.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from asyncrl.engines.models.tensor_parts import Kind, StoredTensor, TensorPart
from asyncrl.engines.training.ranks.rank_mesh import RankMesh
from asyncrl.engines.training.ranks.shards import axes_cut, gather_state, is_of_experts, own_part, own_ranges, share_out
from asyncrl.engines.training.ranks.stage_weights import StageWeights
from asyncrl.errors import JournalError

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
