"""The environment of worker processes, forked or spawned."""

import sys
from collections.abc import Mapping

FRAME_MALLOC = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "8000000000",
    "MALLOC_TOP_PAD_": "67108864",
}
"""Keep the memory of large received frames instead of mapping it anew for each: 3 to 8 times faster on frames of 64 MB.
Only where rows travel as frames; elsewhere it would merely hold memory."""

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
RANKS_MEET = {"GLOO_SOCKET_IFNAME": LOOPBACK, "NCCL_SOCKET_IFNAME": LOOPBACK}
"""torch.distributed would listen where the host's name leads, which may be the network."""


def worker_environment(inherited: Mapping[str, str], threads: int = 1, wire: str = "ipc") -> dict[str, str]:
    """Returns the environment variables of a worker. threads, wire: `fleet.threads` and `fleet.wire` of the config."""
    openmp = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    malloc = FRAME_MALLOC if wire == "tcp" else {}
    return {**malloc, **RANKS_MEET, **inherited, **openmp, "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
