"""Chooses the functions that score a group: those of the run, or those of its held-out set."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from asyncrl.config.schema import Config
from asyncrl.rewards.functions import FunctionSpec


@dataclass(frozen=True, slots=True)
class ChosenFunctions:
    """Functions by their numbers in the pool. is_own: whether they belong to a held-out set, so that nothing else
    scores its samples."""

    specs: tuple[FunctionSpec, ...]
    first: int
    is_own: bool = False

    @property
    def single(self) -> list[int]:
        return [self.first + place for place, spec in enumerate(self.specs) if not spec.group]

    @property
    def grouped(self) -> list[int]:
        return [self.first + place for place, spec in enumerate(self.specs) if spec.group]


@dataclass(frozen=True, slots=True)
class FunctionChoice:
    """All functions of a reward worker. sets: of the held-out sets that have functions of their own."""

    config: Config
    run: ChosenFunctions
    sets: Mapping[str, ChosenFunctions]

    @classmethod
    def of(cls, config: Config, specs: Sequence[FunctionSpec], held_out: Mapping[str, Sequence[FunctionSpec]]) -> Self:
        """Numbers the functions. specs, held_out: in the order in which the pool has them."""
        sets = {}
        first = len(specs)
        for name, own in held_out.items():
            sets[name] = ChosenFunctions(tuple(own), first, is_own=True)
            first += len(own)
        return cls(config, ChosenFunctions(tuple(specs), 0), sets)

    def of_group(self, group: int) -> ChosenFunctions:
        """Returns the functions of a group. Those of the evaluation have negative ids."""
        return self.run if group >= 0 else self.sets.get(self.config.evaluate.set_of(group).name, self.run)

    def place(self, group: int) -> str:
        """Returns the name of a group in errors: its number, or that of its prompt in a held-out set. Prompts that are
        those of training hold nothing out."""
        if group >= 0:
            return f"group {group}"
        chosen = self.config.evaluate.set_of(group)
        config = self.config
        prompt = f"prompt {chosen.group(0) - group}" + (f" of {chosen.section}" if chosen.name else "")
        return f"held-out {prompt}" if chosen.prompts not in ("", config.task.prompts) else prompt

    def members(self, group: int) -> int:
        """Returns the number of samples of a group."""
        evaluate = self.config.evaluate
        return self.config.task.samples_per_prompt if group >= 0 else evaluate.set_of(group).samples
