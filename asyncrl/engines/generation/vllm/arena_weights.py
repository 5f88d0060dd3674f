"""The weights of one version, as a process of vLLM reads them from the trainer's arena."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.errors import PeerLost, WeightsError
from asyncrl.lanes.weights.arena import Reader, open_reader
from asyncrl.lanes.weights.tensor_spec import WeightsSpec, spec_of
from asyncrl.protocols.messages import Published


class ArenaWeights:
    """Opens a version, and gives its tensors once."""

    def __init__(self) -> None:
        self._reader: Reader | None = None
        self._attached: tuple[Published, Mapping[str, Tensor]] | None = None

    def attach(self, folder: Path, dtype: str, published: Sequence[Any]) -> str:
        """Opens a version and checks its digest. Returns the error that refuses it, its class first, or "". folder,
        dtype: of the model. published: the fields of Published up to digest_of."""
        version = Published(*published)
        self._attached = None
        try:
            if self._reader is None or self._reader.address != version.arena:
                self._reader = open_reader(version, weights_spec(folder, dtype))
            self._attached = version, self._reader.tensors(version)
        except (PeerLost, WeightsError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    @contextmanager
    def taken(self, version: int) -> Iterator[Mapping[str, Tensor]]:
        """Gives the tensors of the attached version for a block, under every name, those of tied embeddings included.
        Raises WeightsError after the block if the version was overwritten."""
        assert self._reader is not None, "attach comes first"
        assert self._attached is not None, "attach comes first"
        published, tensors = self._attached
        assert published.version == version, f"version {published.version} was attached"
        self._attached = None
        yield tensors
        self._reader.check(published)


ARENA = ArenaWeights()
"""The weights that this process of vLLM has attached: calls of WorkerExtension attach them, and load them on CPUs;
ArenaTransfer loads them on GPUs."""


def weights_spec(folder: Path, dtype: str) -> WeightsSpec:
    """Returns the specification of the weights that a trainer of this model publishes, without reading any weight."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return spec_of(model, dtype)
