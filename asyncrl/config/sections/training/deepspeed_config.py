"""The table `training.deepspeed`: what DeepSpeed's ZeRO shares out over the ranks of the trainer."""

from typing import Literal

from asyncrl.config.sections.algorithm_config import Section

BUCKET = 8 << 20
"""Numbers of gradients, or of weights, that DeepSpeed exchanges at a time."""


class DeepspeedConfig(Section):
    """ZeRO of training.engine = "deepspeed"."""

    stage: Literal[1, 2, 3] = 2
    """ZeRO stage, which splits over the layout.dp ranks: 1 the moments of the optimizer, 2 gradients too, 3 weights
    too."""
    offload: bool = False
    """Keeps moments and their float32 weights in the memory of the host, where the optimizer computes."""
