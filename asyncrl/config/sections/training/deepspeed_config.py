"""The table `training.deepspeed`: what DeepSpeed's ZeRO shares out over the ranks of the trainer."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from asyncrl.config.sections.algorithm_config import Section


def _supported(stage: Any) -> Any:
    if stage == 3:
        text = 'stage 3 is not supported: write 1 or 2, or engine = "torch" with layout = { shard = N }'
        raise ValueError(f"{text}, whose ranks share out the weights too")
    return stage


class DeepspeedConfig(Section):
    """Read with training.engine = "deepspeed" alone."""

    stage: Annotated[Literal[1, 2], BeforeValidator(_supported)] = 2
    """Shares of each of the layout.dp ranks: 1 of moments, 2 of gradients too."""
    offload: bool = False
    """Keeps moments and the float32 weights that they change in the memory of the host, where the optimizer computes,
    instead of on the device."""
