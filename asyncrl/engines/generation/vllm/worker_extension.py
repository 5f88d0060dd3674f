"""What asyncrl adds to the processes that vLLM starts: they read new weights from the trainer's arena, and end with the
worker that started them. vLLM imports this module in each of its workers and mixes WorkerExtension into its class."""

import os
import select
import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from asyncrl.engines.generation.vllm.arena_weights import ARENA, PolicyModel
from asyncrl.engines.generation.vllm.option_problems import BACKEND, OWNER


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
