"""The optimizer on float32 master weights: gradients summed over ranks and clipped, the schedule of the learning rate,
and no step on a gradient that is not finite."""

import importlib
import math
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from asyncrl.config.schema import TrainingConfig
from asyncrl.config.sections.training_config import OPTIMIZERS, default_options
from asyncrl.engines.models.tensor_parts import StoredTensor
from asyncrl.engines.ranks.rank_mesh import RankMesh, Ranks
from asyncrl.engines.ranks.shards import as_part_of, axes_cut, is_of_experts, is_part, own_part, share_out
from asyncrl.errors import ConfigError, WeightsError
from asyncrl.lanes.weights.slot_memory import HEADS, INNER, MATRICES, roles_of

# Gradients over ranks: their sum over ranks with the same weights, their norm over shards, and the check that copies
# of the weights agree.


BUCKET = 8 << 20
"""Gradient values per all-reduce. Single tensors would cost a round trip each; all tensors at once would need a second
copy of the gradient."""


def sum_gradients(mesh: RankMesh, parameters: Sequence[nn.Parameter], tied: Tensor | None = None) -> None:
    """Sums gradients over the copies of the weights. Each rank has already divided by the denominators of the whole
    optimizer step. Gradients of sharded weights were summed in the backward pass. tied: the embedding that is the head
    too, of which the first and the last stage have a copy."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if parameter is tied and mesh.ends.size > 1:
            gradient = own_part(parameter.grad)
            gradient.copy_(mesh.ends.sum(gradient))
    if mesh.sharding is None:
        for copies, held in _by_copies(mesh, parameters):
            _sum_in_buckets(copies, own_gradients(held))


def _by_copies(mesh: RankMesh, tensors: Iterable[Tensor]) -> Iterator[tuple[Ranks, list[Any]]]:
    """Yields tensors with the ranks that hold the same of them: of experts fewer ranks do than of other weights."""
    found: tuple[list[Any], list[Any]] = ([], [])
    for tensor in tensors:
        found[is_of_experts(tensor)].append(tensor)
    yield mesh.copies, found[False]
    yield mesh.expert_copies, found[True]


def _sum_in_buckets(copies: Ranks, gradients: Sequence[Tensor]) -> None:
    for bucket in _buckets(gradients) if copies.size > 1 else ():
        _sum_at_once(copies, bucket)  # Its memory is free again before that of the next one is taken.


def _sum_at_once(copies: Ranks, gradients: Sequence[Tensor]) -> None:
    summed = copies.sum(torch.cat([gradient.flatten() for gradient in gradients]))
    parts = torch.split(summed, [gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def own_gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Returns the gradients, or this rank's parts of them, without a copy."""
    return [own_part(parameter.grad) for parameter in parameters if parameter.grad is not None]


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Groups gradients in order into buckets of at most BUCKET values, or of one larger tensor."""
    bucket: list[Tensor] = []
    for gradient in gradients:
        if bucket and sum(each.numel() for each in bucket) + gradient.numel() > BUCKET:
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket


def clip_gradients(
    mesh: RankMesh, parameters: Sequence[nn.Parameter], largest: float, tied: Tensor | None = None
) -> float:
    """Scales gradients down to the largest norm; returns the norm before, over all parts of the weights. tied: see
    `sum_gradients`."""
    if not mesh.is_parted:
        return float(torch.nn.utils.clip_grad_norm_(parameters, largest))
    counted = [each for each in parameters if each is not tied or mesh.ends.rank == 0]
    squares = _squares([each for each in counted if axes_cut(each).isdisjoint(("tp", "ep"))])
    for axis, ranks in (("tp", mesh.tensor), ("ep", mesh.experts)):  # They hold the same of what they do not cut.
        squares = squares + ranks.sum(_squares([each for each in counted if axis in axes_cut(each)]))
    norm = float(mesh.stages.sum(mesh.shards.sum(squares)).sqrt())
    scale = largest / (norm + 1e-6)  # The term is that of torch's clip_grad_norm_.
    for part in own_gradients(parameters) if scale < 1 else ():
        part.mul_(scale)
    return norm


def _squares(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Returns the sum of squares of this rank's parts of the gradients, float64 [1]."""
    found = [part.double().square().sum() for part in own_gradients(parameters)]
    return torch.stack(found).sum().reshape(1).cpu() if found else torch.zeros(1, dtype=torch.float64)


def check_same(mesh: RankMesh, tensors: Iterable[Tensor]) -> None:
    """Raises WeightsError on every rank unless all copies of the weights have the same bits, and so sum gradients of
    one model."""
    if mesh.size == 1:
        return
    differ = False
    digests = []
    for copies, held in _by_copies(mesh, tensors):
        digests.append(digest := _digest(held))
        highest, lowest = copies.largest(torch.tensor([digest, -digest])).tolist()
        differ = differ or highest != -lowest
    if mesh.everyone.largest(torch.tensor([int(differ)])).item():
        own = ", ".join(f"{digest:08x}" for digest in digests if digest)
        raise WeightsError(
            f"the {mesh.size} {mesh.service} ranks no longer hold the same weights (rank {mesh.rank}: {own}); "
            "resume from an earlier checkpoint"
        )


def _digest(tensors: Iterable[Tensor]) -> int:
    digest = 0
    for tensor in tensors:
        values = own_part(tensor).detach().cpu().contiguous()
        digest = zlib.crc32(values.numpy().data.cast("B"), digest) if values.numel() else digest
    return digest


FUSED = ("adam", "adamw")
"""Optimizers whose update is one pass over each tensor."""
MOMENTS = ("exp_avg", "momentum_buffer", "square_avg", "exp_avg_sq")
"""States of optimizers that have the shape of the weight."""
NOTHING_STORED: Mapping[str, StoredTensor] = {}


class OtherWeights(ConfigError):
    """Reports states of an optimizer that are numbered by other weights, as other versions of asyncrl did."""


class Optimizer:
    """Wraps an optimizer of `training.optimizer`, with weight decay on matrices only. parts: the optimizers of torch,
    of which muon has two. updates: optimizer steps since the start of the run, over all incarnations. rate: of the last
    of them.

    torch's optimizers hold this rank's parts of the weights as plain tensors, numbered as the weights of one rank are.
    No weight has a gradient after `step` or `discard`. A step of a trainer calls these, and its checkpoints read the
    states.
    """

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
        trained = [p for p in model.parameters() if p.requires_grad]
        # Those of other pipeline stages are on the meta device: they have a number, and never a gradient.
        self.parameters = [p for p in trained if not p.is_meta]
        self._tied = _tied_weight(model)
        self._planned = steps * settings.updates
        assert all(p.dtype == torch.float32 for p in trained), "master weights are float32"
        # Optimizers get this rank's parts as plain tensors: fused kernels take no mixture of whole tensors and parts.
        self._own = {p: nn.Parameter(own_part(p.detach())) if is_part(p) else p for p in trained}
        self._trained = {own: parameter for parameter, own in self._own.items()}
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        roles = roles_of(model)
        role = {id(parameter): roles[name] for name, parameter in model.named_parameters()}
        decayed = {own for parameter, own in self._own.items() if role[id(parameter)] in MATRICES}
        if settings.optimizer == "muon":
            inner = [each for each in trained if each.ndim == 2 and role[id(each)] in INNER]
            others = [each for each in trained if each.ndim != 2 or role[id(each)] not in INNER]
            adamw = settings.model_copy(update={"optimizer": "adamw", "optimizer_options": {}})
            self.parts = [_optimizer(inner, settings, decayed), _optimizer(others, adamw, decayed)]
        else:
            self.parts = [_optimizer(self._own.values(), settings, decayed)]

    def step(self, mesh: RankMesh, *, finite: bool) -> float | None:
        """Takes one step on the accumulated gradients of all ranks, and returns their norm before clipping; None, with
        no weight changed on any rank, when it or a loss is not finite. finite: the losses of all ranks were finite."""
        norm = math.inf
        if finite:
            sum_gradients(mesh, self.parameters, self._tied)
            norm = clip_gradients(mesh, self.parameters, self.settings.max_grad_norm, self._tied)
        if math.isfinite(norm):
            self.rate = learning_rate(self.settings, self.updates, self._planned)
            self._hand_over_parts()
            for part in self.parts:
                for group in part.param_groups:
                    group["lr"] = self.rate
                part.step()
            self.updates += 1
        self.discard()
        return norm if math.isfinite(norm) else None

    def discard(self) -> None:
        """Drops the accumulated gradients."""
        for parameter, own in self._own.items():
            parameter.grad = own.grad = None

    def _hand_over_parts(self) -> None:
        """Gives the optimizer the parts of weights and gradients as they are now: FSDP2 may have moved them."""
        for parameter, own in self._own.items():
            if own is not parameter and parameter.grad is not None:
                own.data = own_part(parameter.detach())
                own.grad = own_part(parameter.grad)

    def parts_moved(self) -> None:
        """Takes the memory of parts of weights that moved, because the optimizer holds it too."""
        for parameter, own in self._own.items():
            if own is not parameter:
                own.data = own_part(parameter.detach())

    def _weights_of(self, part: torch.optim.Optimizer) -> list[Any]:
        """Returns the weights in the order in which a part numbers their states."""
        return [self._trained[each] for group in part.param_groups for each in group["params"]]

    def states(self) -> list[dict[str, Any]]:
        """Returns the state of each part; where this rank holds parts of weights, its tensors are parts as they are."""
        return [self._with_tensors(part, part.state_dict(), as_part_of) for part in self.parts]

    def state_tensors(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yields the tensors of the states, parts as they are: a name for `load`, the tensor, and its weight."""
        for number, (part, state) in enumerate(zip(self.parts, self.states(), strict=True)):
            parameters = self._weights_of(part)
            for index, values in state["state"].items():
                for key, tensor in values.items():
                    yield f"{number}.{index}.{key}", tensor, parameters[index]

    def settings_of_states(self) -> list[dict[str, Any]]:
        """Returns the states without tensors."""
        return [{**part.state_dict(), "state": {}} for part in self.parts]

    def saved(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns what a checkpoint keeps, tensors and plain values. states: the whole ones."""
        return {"name": self.settings.optimizer, "states": [*states], "updates": self.updates}

    def load(self, saved: Mapping[str, Any], stored: Mapping[str, StoredTensor] = NOTHING_STORED) -> None:
        """Restores what `saved` returned; each rank takes its part of the states. stored: tensors of the states that
        are in files. Raises ConfigError for the states of another optimizer, and OtherWeights."""
        name = saved["name"]
        states = saved["states"]
        if name != self.settings.optimizer:
            raise ConfigError(
                f'training.optimizer = "{self.settings.optimizer}": the checkpoint holds the state of {name}; write '
                f'"{name}", or start anew with another --run-dir'
            )
        self.updates = saved["updates"]
        for name, tensor in stored.items():
            number, index, key = name.split(".", 2)
            states[int(number)]["state"].setdefault(int(index), {})[key] = tensor
        self._refuse_other_weights(states)
        self._restore(states)

    def _refuse_other_weights(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Raises OtherWeights for states that are numbered by other weights: torch looks at the numbers of weights, and
        would give the moments of one weight to another one of any shape."""
        counts = [[len(group["params"]) for group in state["param_groups"]] for state in states]
        own = [[len(group["params"]) for group in part.param_groups] for part in self.parts]
        for part, state in zip(self.parts, states, strict=False):
            parameters = self._weights_of(part)
            for number, values in state["state"].items():
                known = parameters[number] if number < len(parameters) else None
                moments = [tuple(values[key].shape) for key in MOMENTS if values.get(key) is not None]
                if known is not None and (not moments or moments[0] == tuple(known.shape)):
                    continue
                name = "no weight" if known is None else f"{self._names[known]} {tuple(known.shape)}"
                first = f"; the first that differ are moments {moments[0] if moments else ''} for {name}"
                raise OtherWeights(f"{_counted(counts)}, and this version has {_counted(own)}{first}")
        if counts != own:
            raise OtherWeights(f"{_counted(counts)}, and this version has {_counted(own)}")

    def _restore(self, states: Sequence[dict[str, Any]]) -> None:
        """Takes this rank's parts of the whole states."""
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(self._with_tensors(part, state, share_out))

    def _with_tensors(
        self, part: torch.optim.Optimizer, state: Mapping[str, Any], change: Callable[[Any, Tensor], Tensor]
    ) -> dict[str, Any]:
        """Returns the state with tensors changed; `change` is also given the parameter of the model. That of weights of
        other pipeline stages is left out. Plain values, as bitsandbytes' number of steps, stay as they are."""
        parameters = self._weights_of(part)
        changed = {
            number: {
                key: change(value, parameters[number]) if isinstance(value, Tensor | StoredTensor) else value
                for key, value in values.items()
            }
            for number, values in state["state"].items()
            if not parameters[number].is_meta
        }
        return {**state, "state": changed}


def _counted(counts: Sequence[Sequence[int]]) -> str:
    """Returns the numbers of weights of each optimizer of torch: with weight decay and without."""
    return " and ".join(f"{matrices} weights with decay and {others} without" for matrices, others in counts)


def _optimizer(
    parameters: Iterable[Tensor], settings: TrainingConfig, decayed: Collection[Tensor]
) -> torch.optim.Optimizer:
    """Makes an optimizer of torch or bitsandbytes of some parameters, of which weight decay acts on some."""
    kind = OPTIMIZERS[settings.optimizer]
    options = default_options(settings.optimizer)
    given = settings.optimizer_options.items()
    options |= {key: tuple(value) if isinstance(value, list) else value for key, value in given}
    if kind.betas:
        options["betas"] = settings.betas
    matrices, others = ([p for p in parameters if (p in decayed) == wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
    if settings.optimizer in FUSED:
        options["fused"] = True
    make = getattr(importlib.import_module(kind.module), kind.name)
    made: torch.optim.Optimizer = make(groups, lr=settings.learning_rate, **options)
    return made


def _tied_weight(model: Any) -> Tensor | None:
    """Returns the weight of an embedding that is the head too; None where they have weights of their own."""
    embeddings = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    ends = [each for each in (embeddings, *(getattr(model, name, None) for name in HEADS)) if each is not None]
    weights: list[Any] = [each.weight for each in ends]
    return next((each for each in weights[:1] if any(each is other for other in weights[1:])), None)


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
