"""Starts DeepSpeed on ranks that are connected already.

DeepSpeed compiles extensions of torch at the moment that it needs them. None is needed here: optimizers are torch's,
and the exchange over shared memory, which DeepSpeed would compile for CPUs, serves inference alone. Where it compiles
one nevertheless, it waits without a deadline for the lock file of a process that compiles the same, even of a dead one.
"""

import importlib
import logging
import os
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from asyncrl.config.install_hints import install_extra
from asyncrl.config.schema import TrainingConfig
from asyncrl.config.sections.training_config import BUCKET
from asyncrl.errors import ConfigError

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
