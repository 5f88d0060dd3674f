"""The optimizer of ranks that share out moments and gradients by DeepSpeed."""

import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from asyncrl.config.schema import TrainingConfig
from asyncrl.engines.models.tensor_parts import StoredTensor
from asyncrl.engines.training.optimizers.deepspeed_engine import noted_modules, start_deepspeed
from asyncrl.engines.training.optimizers.optimizer import MOMENTS, Optimizer, OtherWeights, learning_rate
from asyncrl.engines.training.optimizers.zero_root import ZeroRoot, run_as_one
from asyncrl.engines.training.optimizers.zero_weights import is_flat_part, own_flat_part
from asyncrl.engines.training.ranks.rank_mesh import RankMesh

Found = TypeVar("Found")


class ModelInPasses(Protocol):
    """A model whose passes another engine may run."""

    whole: Any
    head: Any
    device: torch.device

    def run_by(self, root: Callable[[Callable[[], Any]], Any], backward: Callable[[Tensor], None]) -> None: ...

    def in_pass(self, compute: Callable[[], Found]) -> Found: ...

    def backward(self, loss: Tensor) -> None: ...

    def hidden(self, ids: Tensor) -> Tensor: ...


class ZeroOptimizer(Optimizer):
    """Has DeepSpeed run the passes of a model, sum gradients in each backward pass, clip them and take steps. Weights
    are numbered as by other optimizers, so that any layout resumes what it saved."""

    def __init__(self, model: ModelInPasses, settings: TrainingConfig, steps: int, mesh: RankMesh) -> None:
        super().__init__(model.whole, settings, steps)
        self._model = model
        self._mesh = mesh
        self._inner = self.parts[0]
        self._groups = self._inner.state_dict()["param_groups"]
        self._numbered = [each for group in self._inner.param_groups for each in group["params"]]
        root = ZeroRoot(model.whole, model.head)
        self._engine = start_deepspeed(root, self._inner, settings, model.device)
        self._noted = noted_modules()
        self._own_notes = len(self._noted)
        model.head = root.head
        model.run_by(self._run, self._backward)

    def _run(self, compute: Callable[[], Found]) -> Found:
        # DeepSpeed notes in stage 3 which modules run, and a layer that is computed again ends before they are done.
        del self._noted[self._own_notes :]
        return run_as_one(self._engine, compute)

    def _backward(self, loss: Tensor) -> None:
        self._engine.backward(loss * self._mesh.size)  # DeepSpeed averages over ranks.

    def step(self, mesh: RankMesh, *, finite: bool) -> float | None:
        if not finite:
            self.discard()
            return None
        rate = learning_rate(self.settings, self.updates, self._planned)
        self._take(rate)
        norm = float(self._engine.get_global_grad_norm())
        if self._engine.optimizer.overflow or not math.isfinite(norm):
            return None
        self.rate = rate
        self.updates += 1
        return norm

    def _take(self, rate: float) -> None:
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate
        self._engine.step()

    def discard(self) -> None:
        """Drops the accumulated gradients: DeepSpeed does where they are not finite, and has no other call for it."""
        self._pass(math.nan)
        self._engine.step()

    def _pass(self, factor: float) -> None:
        """Adds a gradient of zeros times the factor."""
        model = self._model
        ids = torch.zeros((1, 2), dtype=torch.long, device=self._model.device)
        model.backward(factor * (0.0 * model.in_pass(lambda: model.hidden(ids).float().sum())))

    def states(self) -> list[dict[str, Any]]:
        raise NotImplementedError("ranks hold flat parts of states: `state_tensors` gathers one after the other")

    def settings_of_states(self) -> list[dict[str, Any]]:
        return [{"state": {}, "param_groups": [{**group, "lr": self.rate} for group in self._groups]}]

    def state_tensors(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yields whole tensors, each gathered as it is asked for: all ranks take all of them."""
        utilities = importlib.import_module("deepspeed.utils")
        own: dict[str, Tensor] = next(iter(self._inner.state.values()), {})
        self._link_states()
        for number, parameter in enumerate(self._numbered):
            for key, value in own.items():
                whole = value if not value.dim() else utilities.safe_get_full_optimizer_state(parameter, key)
                yield f"0.{number}.{key}", whole, parameter

    def _refuse_other_weights(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Compares by number and shape: DeepSpeed has put flat tensors in the place of the weights of its groups."""
        for number, values in states[0]["state"].items():
            weight = self._numbered[number] if number < len(self._numbered) else None
            shape = None if weight is None else tuple(getattr(weight, "ds_shape", weight.shape))
            moments = [tuple(values[key].shape) for key in MOMENTS if values.get(key) is not None]
            if shape is None or (moments and moments[0] != shape):
                known = "no weight" if shape is None else f"a weight of {shape}"
                raise OtherWeights(f"moments {moments[0] if moments else ''} for {known} of this version")

    def _restore(self, states: Sequence[dict[str, Any]]) -> None:
        """Takes this rank's parts of the whole states, which DeepSpeed makes in its first step: one that changes no
        weight, as gradient and learning rate are 0."""
        saved: Mapping[int, Mapping[str, Tensor | StoredTensor]] = states[0]["state"]
        if not saved:
            return
        self._pass(0.0)
        self._take(0.0)
        self._link_states()
        for number, parameter in enumerate(self._numbered):
            for key, value in saved[number].items():
                if value.dim():
                    self._set_state(parameter, key, value.whole() if isinstance(value, StoredTensor) else value)
        step = saved[0]["step"]
        for state in self._inner.state.values():
            state["step"].copy_(step.whole() if isinstance(step, StoredTensor) else step)

    def _set_state(self, parameter: nn.Parameter, key: str, whole: Tensor) -> None:
        """Takes this rank's part of a moment. In stage 3 DeepSpeed (0.19.8) cannot cut a tensor whose numbers ranks do
        not share evenly."""
        utilities = importlib.import_module("deepspeed.utils")
        if is_flat_part(parameter):
            part = own_flat_part(whole, self._mesh.rank, self._mesh.size)
            utilities.safe_set_local_optimizer_state(parameter, part, key)
        else:
            utilities.safe_set_full_optimizer_state(parameter, whole, key)

    def _link_states(self) -> None:
        """Has DeepSpeed find the states of all groups of parameters: by itself (0.19.8) it looks once there are those
        of the first one."""
        zero = self._engine.optimizer
        if self._inner.state and self._mesh.zero < 3:
            zero._hp_optimizer_states_linked = False
            zero._lazy_init_hp_params_optimizer_state()
