"""The optimizer of ranks that share out moments, gradients and weights by DeepSpeed, and the choice between it and
torch's own (`open_optimizer`)."""

import importlib
import logging
import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from asyncrl.config.install_hints import install_extra
from asyncrl.config.schema import TrainingConfig
from asyncrl.config.sections.training_config import BUCKET
from asyncrl.engines.models.tensor_parts import StoredTensor, TensorPart
from asyncrl.engines.ranks.pipeline import ElsewhereTensor, StageWeights
from asyncrl.engines.ranks.rank_mesh import RankMesh, Ranks
from asyncrl.engines.ranks.shards import HeldModel, PassRoot
from asyncrl.engines.training.optimizer import MOMENTS, Optimizer, OtherWeights, learning_rate
from asyncrl.errors import ConfigError

# Starts DeepSpeed on ranks that are connected already.
#
# DeepSpeed compiles extensions of torch at the moment that it needs them. None is needed here: optimizers are
# torch's, and the exchange over shared memory, which DeepSpeed would compile for CPUs, serves inference alone. Where
# it compiles one nevertheless, it waits without a deadline for the lock file of a process that compiles the same,
# even of a dead one.


UNUSED_EXTENSION = "deepspeed_shm_comm"
EXTENSIONS = "TORCH_EXTENSIONS_DIR"
COMPILED_WITHIN = 600.0
"""Seconds after which a lock file is that of a dead process: an extension compiles within a minute or two."""

EACH_CALL_ALONE = (
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "stage3_max_reuse_distance",
)
"""Options that are 0 so that a call of a module gathers its weights and frees them, whatever ran before: DeepSpeed else
guesses what comes from the pass before, and passes with and without a backward pass alternate."""


def start_deepspeed(
    root: nn.Module, optimizer: torch.optim.Optimizer, settings: TrainingConfig, device: torch.device
) -> Any:
    """Returns an engine that shares out the model below `root` over all ranks. Raises ConfigError when DeepSpeed is
    missing, or would wait for the lock of a dead process."""
    deepspeed = _imported(device)
    size = sum(each.numel() for group in optimizer.param_groups for each in group["params"])
    engine, *_ = deepspeed.initialize(model=root, optimizer=optimizer, config=_options(settings, min(BUCKET, size)))
    return engine


def noted_modules() -> list[Any]:
    """Returns the list in which DeepSpeed (0.19.8) notes modules whose forward pass it believes to be running."""
    noted: list[Any] = importlib.import_module("deepspeed.runtime.zero.parameter_offload").FWD_MODULE_STACK
    return noted


def _imported(device: torch.device) -> Any:
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
    own = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "asyncrl" / "torch_extensions"
    refuse_stale_lock(Path(os.environ.setdefault(EXTENSIONS, str(own))))
    try:
        deepspeed = importlib.import_module("deepspeed")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"training.engine: {error.name} is not installed; run: {install_extra('deepspeed')}"
        ) from None
    deepspeed.ops.__compatible_ops__[UNUSED_EXTENSION] = False
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # Else it writes its whole configuration.
    renamed = r"`torch\.distributed\.\w+_tensor` is deprecated"
    warnings.filterwarnings("ignore", renamed, FutureWarning)
    return deepspeed


def refuse_stale_lock(folder: Path) -> None:
    """Raises ConfigError when a process that compiled an extension in the folder died and left its lock."""
    for lock in sorted(folder.glob("**/lock")):
        if time.time() - lock.stat().st_mtime > COMPILED_WITHIN:
            raise ConfigError(
                f"training.engine: DeepSpeed would wait without end for {lock}, which a process left that died while "
                "it compiled: delete that file"
            )


def _options(settings: TrainingConfig, bucket: int) -> dict[str, Any]:
    """Returns the config of DeepSpeed. bucket: numbers that are exchanged at a time."""
    zero: dict[str, Any] = {
        "stage": settings.deepspeed.stage,
        "overlap_comm": False,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
    }
    if settings.deepspeed.stage == 3:
        zero |= dict.fromkeys(EACH_CALL_ALONE, 0)
    if settings.deepspeed.offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": settings.max_grad_norm,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }


# Weights that ranks share out in flat parts, as DeepSpeed does in stage 3.
#
#     a tensor of 10 numbers on 4 ranks   [0 1 2] [3 4 5] [6 7 8] [9 . .]   the last parts may have less, or nothing


class FlatTensor(ElsewhereTensor):
    """Stands for a weight of which this rank holds a flat part; all ranks gather it."""

    def __init__(self, own: Tensor, shape: torch.Size, ranks: Ranks) -> None:
        super().__init__(own, shape)
        self._ranks = ranks

    @classmethod
    def of(cls, parameter: Any, ranks: Ranks) -> "FlatTensor":
        return cls(parameter.ds_tensor.detach(), parameter.ds_shape, ranks)

    def to(self, dtype: torch.dtype) -> "FlatTensor":
        return FlatTensor(self.own.to(dtype), self.shape, self._ranks)

    def full_tensor(self) -> Tensor:
        gathered = torch.cat(self._ranks.gather_equal(self.own))
        return gathered[: self.shape.numel()].view(self.shape)


def is_flat_part(tensor: Tensor | nn.Parameter) -> bool:
    """Returns whether DeepSpeed shares out a weight."""
    return hasattr(tensor, "ds_tensor")


def own_flat_part(whole: Tensor, rank: int, ranks: int) -> Tensor:
    """Returns the part of a rank, which zeros fill up to the length of the others."""
    size = -(-whole.numel() // ranks)
    part = whole.flatten()[rank * size : (rank + 1) * size]
    return torch.cat([part, part.new_zeros(size - len(part))])


# The module whose calls DeepSpeed sees: one for each pass, with the same calls below it on all ranks.
#
#     a call             head, layers     gathered for it, in stage 3, and freed at its end
#     its backward pass  head, layers     gathered again
#
# In stage 3 each call of a module is an exchange, and DeepSpeed compares the lists of calls of all ranks. The head
# computes a chunk of tokens at a time, so that ranks with more tokens would call it more often: its weights belong to
# this module, and it is called in a way that DeepSpeed does not see.


Found = TypeVar("Found")


class ZeroRoot(PassRoot):
    """Runs computations with a model. head: maps hidden states to the output of the model."""

    def __init__(self, whole: nn.Module, head: nn.Module) -> None:
        super().__init__(whole)
        for name, parameter in head.named_parameters():
            self.register_parameter(f"head_{name.replace('.', '_')}", parameter)
        self._call_head = head.forward

    def head(self, states: Tensor) -> Tensor:
        return cast(Tensor, self._call_head(states))


def run_as_one(engine: Callable[[Callable[[], Any]], Any], compute: Callable[[], Found]) -> Found:
    """Runs a computation that returns a tensor or several of one shape. The engine gets one tensor: it gathers weights
    for the backward pass of each that has a gradient, of which ranks without rows have fewer."""
    trained: list[bool] = []

    def joined() -> Tensor:
        found: Any = compute()
        if isinstance(found, Tensor):
            return found
        trained.extend(each.requires_grad for each in found)
        return torch.stack(found)

    whole = engine(joined)
    if not trained:
        return cast(Found, whole)
    parts = zip(whole.unbind(), trained, strict=True)
    return cast(Found, tuple(each if has_gradient else each.detach() for each, has_gradient in parts))


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


# Opens the optimizer of a model, and what this rank holds of it: torch's, or DeepSpeed's.


def open_optimizer(model: ModelInPasses, settings: TrainingConfig, steps: int, mesh: RankMesh) -> Optimizer:
    """Returns the optimizer for a run of `steps` iterations. All ranks call it together. Raises ConfigError as
    `start_deepspeed`."""
    if not mesh.zero:
        return Optimizer(model.whole, settings, steps)
    with mesh.failing():
        return ZeroOptimizer(model, settings, steps, mesh)


def hold_model(whole: Any, stage: StageWeights | None, mesh: RankMesh) -> HeldModel:
    """Returns what this rank writes into checkpoints, and reads from them. stage: see HeldModel."""
    return (ZeroModel if mesh.zero else HeldModel)(whole, stage, mesh)


@dataclass(frozen=True, eq=False)
class ZeroModel(HeldModel):
    """Holds a model that DeepSpeed trains."""

    def published(self, named: Mapping[str, Tensor]) -> dict[str, Any]:
        if self.mesh.zero < 3:
            return super().published(named)
        found: dict[int, FlatTensor] = {}
        held = self.whole.named_parameters(remove_duplicate=False)
        return {name: found.setdefault(id(each), FlatTensor.of(each, self.mesh.everyone)) for name, each in held}

    def _parts(self, named: Iterable[tuple[str, Tensor]], *, copy: bool) -> dict[str, TensorPart]:
        """Keeps this rank's rows of whole tensors, one after the other, in memory of their own."""
        found: dict[str, TensorPart] = {}
        rank = self.mesh.rank
        ranks = self.mesh.size
        for name, tensor in named:
            flat = is_flat_part(tensor)
            whole = FlatTensor.of(tensor, self.mesh.everyone).full_tensor() if flat else tensor.detach()
            if not whole.dim():
                if rank == 0:
                    found[name] = TensorPart(whole.to("cpu", copy=True), ())
                continue
            rows = -(-len(whole) // ranks)
            part = whole[rank * rows : (rank + 1) * rows]
            if part.numel():
                found[name] = TensorPart(part.to("cpu", copy=True), (rank * rows, *[0] * (whole.dim() - 1)))
        return found
