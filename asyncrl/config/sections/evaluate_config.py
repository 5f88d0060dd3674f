"""The section `[evaluate]` and the tables `[evaluate.sets.NAME]`, with the entry of a function that scores samples."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from asyncrl.config.sections.algorithm_config import NonEmpty, Positive, Section
from asyncrl.config.sections.named_values import Named
from asyncrl.config.sections.secret import Options

# One entry of `reward.functions`, `cost.functions` or the functions of a held-out set.


class RewardFunction(Section):
    """One reward or cost function."""

    use: str
    """Template (`exact_match`, `numeric`, ...), or `FILE.py:function` or `module:function`, also behind `trl:` or
    `verl:`."""
    name: str = ""
    """Name in metrics and samples; default: the last part of `use`."""
    weight: float = 1.0
    """Factor of the function's value in the reward."""
    group: bool = False
    """The function takes a group's samples and returns a reward for each."""
    by_token: bool = False
    """The function returns a reward for each sampled token of a sample."""
    options: Options = Field(default={})
    """Keyword arguments of a template."""

    @model_validator(mode="before")
    @classmethod
    def _text_is_short_for_use(cls, value: Any) -> Any:
        return {"use": value} if isinstance(value, str) else value

    @property
    def term(self) -> str:
        """Returns the name of the function's term in metrics and samples."""
        return self.name or self.use.rpartition(":")[2]


SET_NAME = re.compile(r"[A-Za-z][\w.-]*")
TAKEN = ("reward", "cost", "code", "version")
"""Names that metrics `eval/NAME/...` have already."""
TAKEN_OVER = ("every", "samples", "temperature", "size", "pass_term")
"""Keys that a set takes from the section where it lacks them."""


def _set_name(name: str) -> str:
    if not SET_NAME.fullmatch(name) or name in TAKEN:
        raise ValueError(f"{name!r} cannot name a set: write letters and digits, and none of {', '.join(TAKEN)}")
    return name


@dataclass(frozen=True, slots=True)
class HeldOutSet:
    """A set of held-out prompts with all its values. name: "" for that of `[evaluate]` itself. functions: its own
    rewards; none: those of the run. pass_term: the term by which an answer passes, "" for the default. groups_before:
    groups that the sets before may have."""

    name: str
    prompts: str
    options: dict[str, Any]
    functions: tuple[RewardFunction, ...]
    every: int
    samples: int
    temperature: float
    size: int
    groups_before: int
    pass_term: str

    @property
    def section(self) -> str:
        """Returns the beginning of its keys."""
        return f"evaluate.sets.{self.name}" if self.name else "evaluate"

    def group(self, question: int) -> int:
        """Returns the id of the group of a question. Groups of training have none below 0."""
        return -1 - self.groups_before - question


class EvaluationSet(Section):
    """One table of `[evaluate.sets]`. The keys that it lacks have the values of `[evaluate]`."""

    prompts: NonEmpty
    """Source of the held-out prompts, as in task.prompts."""
    options: Options = Field(default={})
    """Keyword arguments of a procedural source."""
    functions: tuple[RewardFunction, ...] = ()
    """Rewards of this set alone, as in reward.functions; default: those of the run."""
    every: Positive | None = None
    """Number of steps between evaluations."""
    samples: Positive | None = None
    """Number of samples for each prompt."""
    temperature: Annotated[float, Field(ge=0)] | None = None
    """Sampling temperature; 0 is greedy."""
    size: Positive | None = None
    """Number of prompts."""
    pass_term: str | None = None
    """Reward term by which an answer of this set passes."""

    @model_serializer(mode="wrap")
    def _written(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Returns the keys that have a value: a file cannot hold others."""
        return {key: value for key, value in write(self).items() if value is not None}


class EvaluateConfig(Section):
    """Evaluation on held-out prompts, or in episodes of a policy that acts, while the run trains."""

    prompts: Annotated[str, Named.ROWS] = ""
    """Source of the held-out prompts, as in task.prompts, or `human_eval:`; default: no evaluation."""
    options: Options = Field(default={})
    """Keyword arguments of a procedural source, whose seed is another than in task.prompts."""
    episodes: Annotated[int, Field(ge=0)] = 0
    """Episodes in each evaluation of a policy that acts; 0: none."""
    every: Positive = 10
    """Steps between evaluations; version 0 and the last one are always evaluated."""
    samples: Positive = 1
    """Number of samples for each prompt."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """Sampling temperature; 0 is greedy."""
    size: Positive = 64
    """Number of prompts."""
    sets: Annotated[dict[Annotated[str, AfterValidator(_set_name)], EvaluationSet], Named.SETS] = Field(default={})
    """Further sets by name, with metrics eval/NAME/...: { math = { prompts = "math.jsonl", functions = ["numeric"],
    every = 50 } }."""
    pass_reward: float = 1.0
    """Smallest reward, or value of `pass_term`, of an answer that passes."""
    pass_term: str = ""
    """Reward term by which an answer passes; default: passes_tests where programs are scored, else the weighted sum."""
    keep_answers: Annotated[int, Field(ge=0)] = 20
    """Newest evaluations of each set whose answers or episodes stay in evaluations/; 0: none."""
    replicas: Positive = 1
    """Number of generation workers of the evaluation."""
    pool: str = ""
    """Pool of these workers; default: that of generation."""

    @property
    def is_on(self) -> bool:
        """Says whether there are held-out prompts or episodes."""
        return bool(self.prompts or self.sets or self.episodes)

    @property
    def held_out(self) -> list[HeldOutSet]:
        """Returns all sets that there are, the one without a name first."""
        return [each for each in self._every_set() if each.prompts]

    def due(self, version: int) -> list[str]:
        """Returns the names of the sets on which a version is evaluated; that of episodes is ""."""
        sets = self.held_out or ([self.set_named("")] if self.episodes else [])
        return [each.name for each in sets if version % each.every == 0]

    @property
    def most_samples(self) -> int:
        """Returns the largest number of samples of a prompt in any set."""
        return max(each.samples for each in self._every_set())

    def set_named(self, name: str) -> HeldOutSet:
        """Returns a set; "" is that of the section itself, also where it has no prompts."""
        return next(each for each in self._every_set() if each.name == name)

    def set_of(self, group: int) -> HeldOutSet:
        """Returns the set of a group of the evaluation, whose id is below 0."""
        *_, found = (each for each in self._every_set() if each.group(0) >= group)
        return found

    def _every_set(self) -> Iterator[HeldOutSet]:
        every: dict[str, EvaluateConfig | EvaluationSet] = {"": self, **self.sets}
        before = 0
        for name, each in every.items():
            taken = {key: getattr(self, key) if (own := getattr(each, key)) is None else own for key in TAKEN_OVER}
            functions = getattr(each, "functions", ())
            found = HeldOutSet(name, each.prompts, each.options, functions, groups_before=before, **taken)
            before += found.size
            yield found
