"""Draws from sources whose weights change while a run goes on: a function of the user gives them for each step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from asyncrl.errors import TaskError
from asyncrl.tasks.prompt_rows import Draw, MixedPrompts
from asyncrl.tasks.prompt_sources import errors_of_code

KEY = "task.curriculum"


@dataclass(frozen=True, slots=True)
class CurriculumDraw(Draw):
    """Returns the row of a group by the weights of its step, which is the number of the group divided by `per_step`:
    the step that trains it, unless groups were dropped before. weights: called with a step. A resumed run draws what it
    would have drawn, because the weights of all steps are asked for again.

    _begun: groups of each source before each step, and the shares that it has not had yet. _asked: shares by step."""

    weights: Callable[[int], Any] = lambda step: ()
    per_step: int = 1
    _begun: list[tuple[tuple[int, ...], tuple[float, ...]]] = field(default_factory=list)
    _asked: dict[int, list[float]] = field(default_factory=dict)

    def number(self, group: int) -> int:
        assert isinstance(self.prompts, MixedPrompts), "the config has a curriculum for several sources only"
        step, place = divmod(group, self.per_step)
        before, lacking = self._beginning(step)
        counts = list(before)
        owed = list(lacking)
        shares = self._shares(step)
        for _ in range(place + 1):
            part = _take(counts, owed, shares)
        rows = len(self.prompts.parts[part])
        return self.prompts.ends[part] - rows + self._place(counts[part] - 1, rows)

    def _beginning(self, step: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Returns the state before a step."""
        assert isinstance(self.prompts, MixedPrompts)
        if not self._begun:
            sources = len(self.prompts.parts)
            self._begun.append(((0,) * sources, (0.0,) * sources))
        while len(self._begun) <= step:
            before, lacking = self._begun[-1]
            counts = list(before)
            owed = list(lacking)
            shares = self._shares(len(self._begun) - 1)
            for _ in range(self.per_step):
                _take(counts, owed, shares)
            self._begun.append((tuple(counts), tuple(owed)))
        return self._begun[step]

    def _shares(self, step: int) -> list[float]:
        """Asks for the weights of a step. Raises TaskError for what are none."""
        assert isinstance(self.prompts, MixedPrompts)
        if step in self._asked:
            return self._asked[step]
        with errors_of_code(f"{KEY}: for step {step} it"):
            found = self.weights(step)
        sources = len(self.prompts.parts)
        is_list = isinstance(found, Sequence) and not isinstance(found, str)
        numbers = [each for each in found if isinstance(each, int | float) and isfinite(each)] if is_list else []
        if len(numbers) != sources or (is_list and len(found) != sources) or min(numbers) < 0 or sum(numbers) <= 0:
            raise TaskError(
                f"{KEY}: it returned {found!r:.80} for step {step}; return a weight of 0 or more for each of the "
                f"{sources} sources, not all 0"
            )
        self._asked[step] = [each / sum(numbers) for each in numbers]
        return self._asked[step]


def _take(counts: list[int], owed: list[float], shares: Sequence[float]) -> int:
    """Gives the next group to the source that lacks most of its share, and returns it."""
    for part, share in enumerate(shares):
        owed[part] += share
    chosen = max((part for part, share in enumerate(shares) if share > 0), key=lambda part: owed[part])
    owed[chosen] -= 1
    counts[chosen] += 1
    return chosen
