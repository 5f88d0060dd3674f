"""What asyncrl adds to the processes that vLLM starts: they read new weights from the trainer's arena, and end with the
worker that started them. vLLM imports this module in each of its workers and mixes WorkerExtension into its class."""

import os
import select
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.config.sections.training_config import LoraConfig
from asyncrl.engines.generation.vllm.option_problems import BACKEND, OWNER
from asyncrl.engines.models.lora import attach, published_spec, read_adapters
from asyncrl.errors import PeerLost, WeightsError
from asyncrl.lanes.weights.arena import Reader, open_reader
from asyncrl.lanes.weights.slot_memory import DTYPES, WeightsSpec, spec_of
from asyncrl.lanes.weights.transports.device_arena import CudaRuntime, CupyRuntime, register_arena
from asyncrl.protocols.messages import Published

# The weights of one version, as a process of vLLM reads them from the trainer's arena.
#
#     without model.lora    all tensors of the arena
#     with it               the base model in its folder, plus the adapters of the arena


NamedTensors = Iterable[tuple[str, Tensor]]


class BaseWeights:
    """Reads the weights of a model folder, one tensor at a time, without holding them. spec: names, shapes and dtype of
    the model. Raises WeightsError when the folder does not have them as safetensors."""

    def __init__(self, folder: Path, spec: WeightsSpec) -> None:
        files: list[Any] = [safe_open(path, "pt") for path in sorted(folder.glob("*.safetensors"))]
        self._spec = spec
        self._file_of = {name: file for file in files for name in file.keys()}  # noqa: SIM118, it is no mapping
        if missing := [each.name for each in spec.tensors if each.name not in self._file_of]:
            raise WeightsError(
                f"model.lora with vLLM reads the base model from safetensors, and those in {folder} lack "
                f'{", ".join(missing[:4])}: save the model again by save_pretrained, or write engine = "torch"'
            )

    def merged(
        self, adapters: Mapping[str, Tensor], lora: LoraConfig, device: torch.device
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields every tensor under each of its names, W + (alpha / rank) B A where there are adapters, computed in
        float32 on `device` and rounded once."""
        aliases: dict[str, list[str]] = {}
        for alias, name in self._spec.aliases:
            aliases.setdefault(name, []).append(alias)
        for each in self._spec.tensors:
            weight = self._file_of[each.name].get_tensor(each.name).to(device)
            layer = each.name.removesuffix(".weight")
            if (down := adapters.get(f"{layer}.lora_A")) is not None:
                up = adapters[f"{layer}.lora_B"]
                delta = up.to(device, torch.float32) @ down.to(device, torch.float32)
                weight = weight.float() + lora.alpha / lora.rank * delta
            weight = weight.to(DTYPES[self._spec.dtype])
            for name in (each.name, *aliases.get(each.name, ())):
                yield name, weight


@dataclass(frozen=True, slots=True)
class PolicyModel:
    """Describes the policy that vLLM samples with: its folder, model.dtype and model.lora."""

    folder: Path
    dtype: str
    lora: LoraConfig | None

    @classmethod
    def read(cls, folder: str, dtype: str, lora: Mapping[str, Any] | None) -> "PolicyModel":
        """Makes it of the values that cross to a process of vLLM."""
        return cls(Path(folder), dtype, None if lora is None else LoraConfig.model_validate(lora))


@dataclass(frozen=True, slots=True)
class AttachedVersion:
    """Holds what is loaded next. tensors: of the arena. check: raises WeightsError when they were overwritten."""

    version: int
    model: PolicyModel
    tensors: Mapping[str, Tensor]
    check: Callable[[], None]


class ArenaWeights:
    """Opens a version, and gives its tensors once. cuda: opens a device, with which the arena is registered when the
    first version is copied to it."""

    def __init__(self, cuda: Callable[[str], CudaRuntime] = CupyRuntime) -> None:
        self._cuda = cuda
        self._reader: Reader | None = None
        self._pageable: Reader | None = None  # the reader, until its arena is registered
        self._base: BaseWeights | None = None
        self._attached: AttachedVersion | None = None

    def attach(self, model: PolicyModel, published: Sequence[Any]) -> str:
        """Opens a version and checks its digest. Returns the error that refuses it, its class first, or "". published:
        the fields of Published up to digest_of."""
        version = Published(*published)
        self._attached = None
        try:
            if self._reader is None or self._reader.address != version.arena:
                self._base = _base_of(model)
                self.close()
                self._reader = self._pageable = open_reader(version, weights_spec(model))
            reader = self._reader
            tensors = reader.tensors(version)
        except (PeerLost, WeightsError) as error:
            return f"{type(error).__name__}: {error}"
        self._attached = AttachedVersion(version.version, model, tensors, lambda: reader.check(version))
        return ""

    def attach_saved(self, model: PolicyModel, adapters: Path, version: int) -> None:
        """Opens adapters in a folder of peft. Raises ConfigError or WeightsError when they cannot be used."""
        self._base = _base_of(model)
        self._attached = AttachedVersion(version, model, read_adapters(adapters), lambda: None)

    @contextmanager
    def taken(self, version: int, device: torch.device) -> Iterator[NamedTensors]:
        """Gives the tensors of the attached version on a device for a block, under every name, those of tied embeddings
        included, one after another. Raises WeightsError after the block if the version was overwritten."""
        assert self._attached is not None, "attach comes first"
        attached = self._attached
        assert attached.version == version, f"version {attached.version} was attached"
        self._attached = None
        if device.type == "cuda" and self._pageable is not None:
            register_arena(self._pageable, partial(self._cuda, str(device)))
            self._pageable = None
        if attached.model.lora is None:
            yield ((name, tensor.to(device)) for name, tensor in attached.tensors.items())
        else:
            assert self._base is not None, "it is opened with the first version"
            yield self._base.merged(attached.tensors, attached.model.lora, device)
        attached.check()

    def close(self) -> None:
        """Unmaps the arena, if one is open."""
        if self._reader is not None:
            self._reader.close()
        self._reader = self._pageable = None


ARENA = ArenaWeights()
"""The weights that this process of vLLM has attached: calls of WorkerExtension attach them, and load them on CPUs;
ArenaTransfer loads them on GPUs."""


def weights_spec(model: PolicyModel) -> WeightsSpec:
    """Returns the specification of the weights that a trainer of this model publishes, without reading any weight."""
    made = _without_weights(model)
    if model.lora is not None:
        attach(made, model.lora, seed=0)
    return published_spec(made, model.dtype)


def _base_of(model: PolicyModel) -> BaseWeights | None:
    if model.lora is None:
        return None
    return BaseWeights(model.folder, spec_of(_without_weights(model), model.dtype))


def _without_weights(model: PolicyModel) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model.folder))


class WorkerExtension:
    """Methods that `collective_rpc` calls in each worker of vLLM."""

    def asyncrl_attach(self, model: list[Any], published: list[Any]) -> str:
        """Opens a version while samples go on. model: arguments of PolicyModel.read. published, answer: those of
        ArenaWeights.attach."""
        return ARENA.attach(PolicyModel.read(*model), published)

    def asyncrl_attach_saved(self, model: list[Any], adapters: str, version: int) -> None:
        """Opens adapters in a folder, as ArenaWeights.attach_saved does."""
        ARENA.attach_saved(PolicyModel.read(*model), Path(adapters), version)

    def asyncrl_load(self, version: int) -> None:
        """Loads the attached version on a CPU. An error leaves a model that must not be used any more."""
        worker: Any = self
        with ARENA.taken(version, torch.device("cpu")) as tensors:
            worker.reload_weights(weights_iterator=iter(tensors))


def end_with(owner: int) -> None:
    """Watches the worker that started vLLM. When that is dead, vLLM's processes from this one up to it are killed: the
    kernel kills no grandchildren, and vLLM would wait for messages of the dead for ever."""
    processes = _up_to(owner)
    if processes is None:
        os.kill(os.getpid(), signal.SIGKILL)
        return
    watched = os.pidfd_open(owner)
    threading.Thread(target=_wait, args=(watched, processes), name="owner", daemon=True).start()


def _wait(watched: int, processes: list[int]) -> None:
    select.select([watched], [], [])
    for process in reversed(processes):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def _up_to(owner: int) -> list[int] | None:
    """Returns this process and its ancestors below `owner`, or None when that is no ancestor, because it is dead."""
    found = list[int]()
    process = os.getpid()
    while process not in (owner, 0):
        found.append(process)
        process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return found if process == owner else None


if OWNER in os.environ:  # This is a process of vLLM.
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    end_with(int(os.environ[OWNER]))
    WeightTransferEngineFactory.register_engine(
        BACKEND, "asyncrl.engines.generation.vllm.arena_transfer", "ArenaTransfer"
    )
