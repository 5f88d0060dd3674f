"""Rules about the section `[model]`."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from asyncrl.config.problems import Problem

if TYPE_CHECKING:
    from asyncrl.config.schema import Config


def model_problems(config: "Config") -> Iterator[Problem]:
    """Yields warnings about values that nothing reads, and about what adapters do not change."""
    model, critic = config.model, config.algorithm.advantage == "gae"
    if model.float32_head and model.dtype == config.training.precision == "float32":
        text = "it changes nothing, because everything is computed in float32 already: remove float32_head"
        yield Problem("model.float32_head", "", text, ("model.dtype", "training.precision"), is_warning=True)
    if model.lora is not None and critic:
        text = (
            "the policy has adapters, but a critic trains all weights of its own model, which takes the memory of full "
            'training; and critics read reference log-probs, so those come from a service: write preset = "grpo" to '
            "save that memory"
        )
        yield Problem("model.lora", "", text, ("algorithm.advantage",), is_warning=True)
    if config.algorithm.kl > 0 and not config.reference_by_service:
        for key in sorted(config.reference.model_dump(exclude_defaults=True)):
            text = "nothing reads it with model.lora: the trainer computes the reference log-probs; remove it"
            yield Problem(f"reference.{key}", "", text, ("model.lora",), is_warning=True)
