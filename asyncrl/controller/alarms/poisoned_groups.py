"""Groups that are dropped as poison, said aloud: what, why, and what to do."""

from collections.abc import Callable

from asyncrl.events import GroupPoisoned, Prompt

TOLD = 5
"""Groups that are told of one by one."""
EXCERPT = 200
"""Characters of a prompt that are shown."""
ADVICE = (
    "If its prompt is to blame, take it out of the task. If the reason is a call that was not answered in time, look "
    "into the logs/ of the worker that is named, or raise fleet.call_deadline or generation.deadline"
)


class Poisoned:
    """say: told of each group, once, with the advice at the first; of many only that they are counted."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self.total = 0

    def observe(self, event: GroupPoisoned) -> None:
        self.total += 1
        if self.total <= TOLD:
            told = f"group {event.group} is given up as poison, its open samples will not train: {event.reason}"
            self._say("\n".join([told, f"  prompt: {_excerpt(event.prompt)}", *([ADVICE] if self.total == 1 else [])]))
        elif self.total == TOLD + 1:
            self._say("further groups are given up as poison; they are counted as data/dropped/poison in metrics.jsonl")


def _excerpt(prompt: Prompt) -> str:
    text = repr(prompt)
    return text if len(text) <= EXCERPT else f"{text[:EXCERPT]}..."
