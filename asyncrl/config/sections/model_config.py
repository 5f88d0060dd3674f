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
    """Factor of the adapters; alpha / rank is what their product is multiplied with."""
    targets: Annotated[tuple[NonEmpty, ...], Field(min_length=1)] = (ALL_LINEAR,)
    """Names of the linear layers with an adapter."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the inputs of adapters that is left out where a gradient is computed."""


class ModelConfig(Section):
    """The policy: the model that is trained."""

    name: str
    """Folder or hub name for from_pretrained, `pypi:smollm2`, or `warmed:TASK` for a tiny model made on the spot."""
    revision: str = ""
    """Branch, tag or commit of a model of the hub; default: main. The run directory notes the commit for resumes."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the published weights and of generation. The trainer's master weights are always float32."""
    float32_head: bool = False
    """Computes the output layer in float32 in the engine, the trainer and the reference, whatever the precision of the
    others: rounded logits cause much of the difference between engine and trainer (MiniMax-M1, arXiv 2506.13585)."""
    lora: LoraConfig | None = None
    """Trains low-rank adapters (LoRA) instead of the model: a table with the keys `rank` (16), `alpha` (32), `targets`
    (["all-linear"], or names of layers such as "q_proj") and `dropout` (0.0). {} takes these values. Only adapters are
    saved in checkpoints and sent to the generation workers. They need about ten times the learning rate of a model."""


class WeightsConfig(Section):
    """The way of new weights from the trainer to the generation workers."""

    transport: Literal["auto", "shm", "tcp", "file", "gloo", "nccl", "cuda_ipc"] = "auto"
    """Transport of new weights. auto: shared memory on one host, else a network. shm: shared memory, read in place.
    tcp: workers pull encrypted parts, and the trainer waits for none of them. file: safetensors in `folder`.
    nccl: from GPU to GPU; gloo: the same path on CPUs, neither encrypted. cuda_ipc: read in place on one GPU."""
    codec: Literal["dense", "sparse", "bfloat16", "float16", "fp8"] = "dense"
    """Encoding of weights that cross a network. sparse: what differs from the version before, exactly. bfloat16 and
    float16 halve float32. fp8: about 60 % fewer bytes than bfloat16, with an error of some 3 % of the weights."""
    folder: str = ""
    """Folder for `transport = "file"`, which the hosts of trainer and generation workers share. Default: `weights` in
    the run directory."""
