"""The section `[weights]` of a config."""

from typing import Literal

from asyncrl.config.sections.algorithm_config import Section


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
