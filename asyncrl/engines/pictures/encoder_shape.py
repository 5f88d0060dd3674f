"""The numbers of a model's encoder of pictures that decide how much memory it takes; without torch.

Counted in the values that torch keeps for each patch until the backward pass, where `hidden` and `inner` are widths:

    a block: two norms                                        6 hidden
             queries, keys and values with their rotation     7 hidden
             gate, activation, up, product                    4 inner
    patch embedding, last norm and merger                     6 hidden
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

FLOAT = 4
NORMS = 6
ATTENTION = 7
GATED = 4
OUTSIDE = 6
ATTENDING = 11
FEEDING = 4
GATES = 3
"""Values of width `hidden` while a block attends, in float32, and while it feeds forward, beside those of width
`inner`, where nothing is kept."""


@dataclass(frozen=True, slots=True)
class EncoderShape:
    """Describes the encoder of Qwen2.5-VL. patch: numbers of the pixels of a patch. merge: a token of the language
    model has merge x merge patches. output: width of the language model."""

    hidden: int
    inner: int
    blocks: int
    patch: int
    merge: int
    output: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Takes the `vision_config` of config.json. Raises KeyError when it describes another kind of encoder."""
        hidden, inner, blocks = (int(config[key]) for key in ("hidden_size", "intermediate_size", "depth"))
        channels = int(config.get("in_channels") or config.get("in_chans") or 3)
        patch = channels * int(config.get("temporal_patch_size") or 2) * int(config["patch_size"]) ** 2
        return cls(
            hidden, inner, blocks, patch, int(config.get("spatial_merge_size") or 2), int(config["out_hidden_size"])
        )

    @property
    def parameters(self) -> int:
        merged = self.merge**2 * self.hidden
        attention = self.hidden * (4 * self.hidden + 4)
        feed_forward = 3 * self.hidden * self.inner + 2 * self.inner + self.hidden
        merger = self.hidden + merged * (merged + 1) + self.output * (merged + 1)
        return self.patch * self.hidden + self.blocks * (attention + feed_forward + 2 * self.hidden) + merger

    def kept_bytes(self, patches: int, narrow: int, *, again: bool) -> int:
        """Returns the bytes that the backward pass finds of so many patches. narrow: bytes of a number that is not of a
        norm. again: blocks are computed again, so that one of them and the input of each are kept."""
        block = FLOAT * NORMS * self.hidden + narrow * (ATTENTION * self.hidden + GATED * self.inner)
        blocks = FLOAT * self.hidden * self.blocks + block if again else self.blocks * block
        return patches * (blocks + FLOAT * OUTSIDE * self.hidden)

    def pass_bytes(self, patches: int, narrow: int) -> int:
        """Returns the most bytes that a pass takes at one moment which keeps nothing. narrow: bytes of a number of the
        model."""
        feeding = narrow * (FEEDING * self.hidden + GATES * self.inner)
        return patches * max(FLOAT * ATTENDING * self.hidden, feeding)
