"""Finds held-out prompts that are trained on too, so that their rewards say nothing about others."""

import json
from collections.abc import Mapping

from asyncrl.config.schema import Config
from asyncrl.tasks.chat_messages import Messages
from asyncrl.tasks.prompt_lengths import LOOKED_AT
from asyncrl.tasks.prompt_rows import PromptRows


def shared_prompts(config: Config, training: PromptRows, held_out: Mapping[str, PromptRows]) -> list[str]:
    """Returns a line for each held-out set that shares prompts with training. Of a large source, LOOKED_AT rows that
    are evenly spread are compared."""
    if config.environment.use or not held_out:  # An environment makes the prompts that count.
        return []
    number = min(len(training), LOOKED_AT)
    trained = {_text(training.row(place * len(training) // number).prompt) for place in range(number)}
    found = []
    for name, prompts in held_out.items():
        chosen = config.evaluate.set_named(name)
        asked = range(min(chosen.size, len(prompts)))
        shared = [row for row in asked if _text(prompts.row(row).prompt) in trained]
        if shared:
            found.append(
                f"{chosen.section}.prompts: {len(shared)} of {len(asked)} prompts are trained on too, such as that of "
                f"{prompts.where(shared[0])}; docs/prompts.md shows how to hold rows out"
            )
    return found


def _text(prompt: Messages) -> str:
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, default=str)
