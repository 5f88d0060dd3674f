"""The engines that sample, and what each can do: rules, checks and specs ask these facts, and compare no names."""

from dataclasses import dataclass
from typing import Literal

EngineName = Literal["torch", "vllm"]
ENGINE_MEANING = "Engine that samples: asyncrl's own, or vLLM."


@dataclass(frozen=True, slots=True)
class Engine:
    """Says what an engine can do.

    title: its name in a sentence. package: what has to be installed; "": nothing. is_own: asyncrl computes the layers,
    so it knows which families it computes, records experts, sees pictures, replays stored samples and bounds its cache;
    another engine has processes of its own, so its worker is neither forked nor part of the trainer. transports: of new
    weights that it reads; (): each. heads: of a model made on the spot, of which it computes the attention.
    """

    title: str
    package: str = ""
    is_own: bool = False
    transports: tuple[str, ...] = ()
    heads: int = 4

    def reads(self, transport: str) -> bool:
        """Returns whether new weights may come by this value of `weights.transport`; "tcp": from another host."""
        return not self.transports or transport in self.transports


ENGINES = {
    "torch": Engine("the torch engine", is_own=True),
    # It reads shared memory alone, and has no attention of less than 32 numbers a head on CPUs.
    "vllm": Engine("vLLM", package="vllm", transports=("auto", "shm"), heads=3),
}
"""Engines by the values of `generation.engine`."""
