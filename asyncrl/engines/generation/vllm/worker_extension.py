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
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.engines.generation.vllm.engine_options import OWNER
from asyncrl.errors import PeerLost, WeightsError
from asyncrl.lanes.weights.arena import Reader, open_reader
from asyncrl.lanes.weights.tensor_spec import WeightsSpec, spec_of
from asyncrl.protocols.messages import Published


class WorkerExtension:
    """Methods that `collective_rpc` calls in each worker of vLLM."""

    asyncrl_reader: Reader | None = None
    asyncrl_weights: dict[str, Any] | None = None

    def asyncrl_attach(self, folder: str, dtype: str, published: list[Any]) -> str:
        """Opens a version and checks its digest, while samples go on. Returns why it is refused, "" if it is not.
        published: the fields of Published up to digest_of."""
        version = Published(*published)
        self.asyncrl_weights = None
        try:
            if self.asyncrl_reader is None or self.asyncrl_reader.address != version.arena:
                self.asyncrl_reader = open_reader(version, weights_spec(Path(folder), dtype))
            self.asyncrl_weights = self.asyncrl_reader.tensors(version)
        except (PeerLost, WeightsError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def asyncrl_load(self, published: list[Any]) -> None:
        """Loads the version that was attached. An error leaves a model that must not be used any more.

        Tensors come under every name, the aliases of tied ones included: without the alias of tied embeddings the
        output layer would keep the old weights on CPUs, where it is a packed copy."""
        assert self.asyncrl_weights is not None, "asyncrl_attach comes first"
        assert self.asyncrl_reader is not None, "asyncrl_attach comes first"
        weights, self.asyncrl_weights = self.asyncrl_weights, None
        worker: Any = self
        worker.reload_weights(weights_iterator=iter(weights.items()))
        self.asyncrl_reader.check(Published(*published))


def weights_spec(folder: Path, dtype: str) -> WeightsSpec:
    """Returns the specification of the weights that a trainer of this model publishes, without reading any weight."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return spec_of(model, dtype)


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
    found, process = list[int](), os.getpid()
    while process not in (owner, 0):
        found.append(process)
        process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return found if process == owner else None


if OWNER in os.environ:
    end_with(int(os.environ[OWNER]))
