"""The transfer of new weights that vLLM's own update calls use on GPUs: from the trainer's arena to the device.

    start_weight_update ── update_weights(version) ── finish_weight_update

Runs in vLLM's processes, where worker_extension.py registers it as BACKEND. On CPUs vLLM cannot use it, because its
`update_weights` waits for an accelerator; `reload_weights` takes its place there. This was never run on a device.
"""

from dataclasses import dataclass

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from asyncrl.engines.generation.vllm.worker_extension import ARENA


@dataclass
class NoInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Needs nothing: the arena is named with each version."""


@dataclass
class Version(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Names the version that was attached before."""

    version: int


class ArenaTransfer(WeightTransferEngine[NoInit, Version]):  # type: ignore[misc]
    """Copies each tensor from shared memory to the device, one at a time, and has the model take its part of it."""

    init_info_cls = NoInit
    update_info_cls = Version

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """Does nothing: WorkerExtension attaches each version."""

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Version) -> None:
        """Loads the attached version. Raises WeightsError when it was overwritten meanwhile."""
        with ARENA.taken(update_info.version, self.device) as tensors:
            self.model.load_weights(tensors)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        ARENA.close()
