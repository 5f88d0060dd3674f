"""The ways of new weights to the engines: what each needs of both ends, and the copies it holds.

Config, placement, checks and lanes ask these facts; only what opens both ends tells transports apart by name.
"""

from dataclasses import dataclass, replace
from typing import Literal

TransportName = Literal["auto", "shm", "tcp", "file", "gloo", "nccl", "cuda_ipc"]
TRANSPORT_MEANING = (
    "Transport of new weights. auto: shared memory on one host, else a network. shm, and cuda_ipc on one GPU: read in "
    "place. tcp: encrypted. file: safetensors in `folder`. nccl between GPUs, gloo on CPUs: not encrypted."
)
SLOTS = 2
"""Versions that an arena holds, or a reader: the one that is read, and the one that is written."""
BUFFERS = 3
"""Versions that a trainer holds for a network: the newest, one that is pulled, and one that is written."""


@dataclass(frozen=True, slots=True)
class Transport:
    """Says what a transport needs and holds.

    way: of version v+1 to generation, in words. same_host: both ends are on one. on: the devices of both ends; "": any.
    same_device: both ends are on one GPU (True), or each has its own (False). listens: the trainer's end answers calls,
    so it is opened on the event loop. needs_ranks: trainer and worker are a pair of ranks. encodes: by `weights.codec`.
    in_folder: into `weights.folder`. in_shm: in /dev/shm. offered, taken: versions that the trainer holds, and each
    reader, besides those in place. package: a module that has to be installed.
    """

    way: str = ""
    same_host: bool = False
    on: Literal["", "cpu", "gpu"] = ""
    same_device: bool | None = None
    listens: bool = False
    needs_ranks: bool = False
    encodes: bool = False
    in_folder: bool = False
    in_shm: bool = False
    offered: int = 0
    taken: int = 0
    package: str = ""


IN_PLACE = Transport("two slots: the trainer writes version v+1 beside v, which generation reads")
ON_GPU = replace(IN_PLACE, way=IN_PLACE.way.replace("slots", "slots on the GPU"), on="gpu", package="cupy")
PULLED = Transport(
    "encrypted parts, which generation pulls beside version v", listens=True, offered=BUFFERS, taken=SLOTS
)
COPIED = Transport("safetensors in a folder, which generation copies beside version v", offered=1, taken=SLOTS)
PAIR = replace(PULLED, needs_ranks=True)
PAIRS = "parts over {}, one pair of ranks for each worker, which receives beside version v"
TRANSPORTS = {
    "auto": Transport(encodes=True),  # It stands for one of the others.
    "inproc": IN_PLACE,  # "auto" and "shm" where all workers are one process.
    "shm": replace(IN_PLACE, same_host=True, in_shm=True),
    "tcp": replace(PULLED, encodes=True),
    "file": replace(COPIED, in_folder=True),
    "cuda_ipc": replace(ON_GPU, same_host=True, same_device=True, offered=SLOTS),
    "gloo": replace(PAIR, way=PAIRS.format("gloo"), on="cpu"),
    "nccl": replace(PAIR, way=PAIRS.format("NCCL"), on="gpu", same_device=False, package="nccl"),
}
"""Transports by the values of `weights.transport`, and `inproc`."""
