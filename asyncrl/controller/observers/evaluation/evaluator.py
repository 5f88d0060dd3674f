"""Evaluates one version on a set of held-out prompts, with the rewards and costs of the run or those of the set."""

import asyncio
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev
from typing import Any, NamedTuple, TypeAlias

from asyncrl.concurrency import gather
from asyncrl.config.schema import Config
from asyncrl.config.user_code import suggestion
from asyncrl.controller.observers.evaluation.answers import HeldOutAnswer, SaveResults
from asyncrl.controller.observers.evaluation.code_metrics import ENDS, PASSES, CodeRates, pass_rates
from asyncrl.errors import ConfigError
from asyncrl.fleet.episode_turns import sample_turns
from asyncrl.objectives.pass_at_k import Rate
from asyncrl.protocols.batch import BatchRef
from asyncrl.protocols.messages import PromptGroup, SampleText, Score
from asyncrl.protocols.seeds import group_seed
from asyncrl.protocols.service_contracts import Environment, Generation, Reward
from asyncrl.rewards.templates import reaches
from asyncrl.tasks.chat_messages import TOOLS, Messages
from asyncrl.tasks.reading.pictures import with_pictures_read

COSTS = "cost/"
"""Prefix of the terms of costs among those of rewards."""

Known = list[float | None]
"""Rewards or costs of a prompt's samples; None for samples without one."""
Question: TypeAlias = tuple[Messages, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of an evaluation.

    mean, stderr: of the reward over prompts (their samples averaged first). cost: the mean of costs, likewise, if there
    are costs. unscorable: samples without a reward or, if there are costs, a cost. code: rates of programs, if rewards
    are about them. name: of the set, "" for that of `[evaluate]` itself. terms: means of the terms of rewards and, with
    `cost/` before their names, of costs, as `mean`. pass_at: by k, of prompts with several samples.
    """

    version: int
    prompts: int
    mean: float
    stderr: float
    cost: float | None
    unscorable: int
    seconds: float
    code: CodeRates | None = None
    name: str = ""
    terms: dict[str, float] = field(default_factory=dict)
    pass_at: dict[int, Rate] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """Returns the numbers by the names of their metrics."""
        found = {
            (f"eval/{term}" if term.startswith(COSTS) else f"eval/reward/{term}"): value
            for term, value in self.terms.items()
        }
        for k, rate in self.pass_at.items():
            found[f"eval/pass_at_{k}"] = rate.mean
            found |= {f"eval/pass_at_{k}_{end}": getattr(rate, end) for end in ENDS}
        found |= {"eval/reward/mean": self.mean, "eval/reward/stderr": self.stderr}
        if self.cost is not None:
            found["eval/cost/mean"] = self.cost
        if self.code is not None:
            found |= self.code.metrics()
        return {self.metric(name.removeprefix("eval/")): value for name, value in found.items()}

    def metric(self, name: str) -> str:
        """Returns the name of a metric of this set."""
        return f"eval/{self.name}/{name}" if self.name else f"eval/{name}"

    @property
    def code_rates(self) -> str:
        """Returns the rates of programs in words, with pass@k only where it is not that of the evaluation already."""
        return "" if self.code is None else str(replace(self.code, pass_at={}) if self.pass_at else self.code)

    def __str__(self) -> str:
        cost = "" if self.cost is None else f", cost {self.cost:.3f}"
        passed = "".join(f", pass@{k} {rate.mean:.3f}" for k, rate in self.pass_at.items())
        code = f"; {rates}" if (rates := self.code_rates) else ""
        of_set = f"set {self.name}, " if self.name else ""
        return (
            f"held out, {of_set}version {self.version}: reward {self.mean:.3f} ± {self.stderr:.3f}{cost}{passed} over "
            f"{self.prompts} prompts{code}"
        )


class _Asked(NamedTuple):
    """One question with its samples. scores: of rewards and, if there are costs, of costs."""

    samples: BatchRef
    scores: list[list[Score]]
    texts: dict[int, SampleText]

    def terms(self) -> list[dict[str, float]]:
        """Returns the terms of each sample."""
        prefixes = ("", COSTS)[: len(self.scores)]
        return [
            {
                f"{prefix}{name}": value
                for prefix, score in zip(prefixes, each, strict=True)
                for name, value in score.terms.items()
            }
            for each in zip(*self.scores, strict=True)
        ]


@dataclass
class Evaluator:
    """Samples all prompts of a held-out set with one version and scores them. cost: the cost service, in a run with
    costs. environment: in a run with episodes. name: of the set. save: takes the answers of an evaluation; without it
    no texts are read.

    Groups have negative ids, which groups of training never have.
    """

    generation: Generation
    reward: Reward
    questions: Sequence[Question]
    config: Config
    cost: Reward | None = None
    environment: Environment | None = None
    name: str = ""
    save: SaveResults | None = None

    def __post_init__(self) -> None:
        self._set = self.config.evaluate.set_named(self.name)
        functions = self._set.functions or self.config.reward.functions
        self._weights = {function.term: function.weight for function in functions}
        self._scorers = [self.reward] if self.cost is None else [self.reward, self.cost]
        # At most as many groups as the engines have slots for: more would only wait in their queues.
        slots = self.config.generation.slots * self.config.evaluate.replicas
        self._places = asyncio.Semaphore(max(1, slots // self._set.samples))

    async def evaluate(self, version: int, incarnation: int) -> Evaluation:
        """Evaluates one version. Raises errors of reward and cost, and Retryable when a worker died meanwhile."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        found = await gather(*(self._ask(index, version, incarnation) for index in range(len(self.questions))))
        rewards, *costs = zip(*([_known(scores) for scores in each.scores] for each in found), strict=True)
        made = summary(version, rewards, costs[0] if costs else None, loop.time() - began)
        terms = [each.terms() for each in found]
        code = CodeRates.of(terms)
        made = replace(made, code=code, name=self.name, terms=_term_means(terms), pass_at=self._pass_at(found))
        if self.save is not None:
            self.save(self.name, version, list(self._answers(version, found)))
        return made

    def _pass_at(self, found: Sequence[_Asked]) -> dict[int, Rate]:
        """Returns pass@k where prompts have several samples. Raises ConfigError when no answer has the term that
        `pass_term` names."""
        if self._set.samples == 1:
            return {}
        scores = [asked.scores[0] for asked in found]
        names = dict.fromkeys(name for each in scores for score in each for name in score.terms)
        term = self._set.pass_term or (PASSES if PASSES in names else "")
        if term and names and term not in names:
            text = f"no reward of the held-out answers has the term {term}{suggestion(term, names)}"
            raise ConfigError(f"{self._set.section}.pass_term: {text}")
        return dict(pass_rates([[self._passes(score, term) for score in each] for each in scores]))

    def _passes(self, score: Score, term: str) -> bool:
        """Returns whether an answer passes by this term, or by its reward where there is none; without a reward it does
        not."""
        mark = self.config.evaluate.pass_reward
        if score.reward is None or term:
            return score.reward is not None and term in score.terms and reaches(score.terms[term], mark)
        weights = self._weights  # A term of a function with several is called function/term.
        parts = (
            value * weights.get(name, weights.get(name.partition("/")[0], 1.0)) for name, value in score.terms.items()
        )
        return reaches(score.reward, mark, sum(map(abs, parts)))

    def _answers(self, version: int, found: Sequence[_Asked]) -> Iterator[HeldOutAnswer]:
        for number, ((_, row), asked) in enumerate(zip(self.questions, found, strict=True)):
            columns = {name: value for name, value in row.items() if name != "prompt"}
            for ref, scores, terms in zip(asked.samples, zip(*asked.scores, strict=True), asked.terms(), strict=True):
                text = asked.texts.get(ref.member)
                yield HeldOutAnswer(
                    version,
                    self.name,
                    number,
                    ref.member,
                    "" if text is None else text.prompt,
                    "" if text is None else text.text,
                    [] if text is None else text.turns,
                    ref.finish,
                    ref.tokens,
                    scores[0].reward,
                    scores[1].reward if len(scores) > 1 else None,
                    terms,
                    columns,
                )

    async def _ask(self, index: int, version: int, incarnation: int) -> _Asked:
        """Samples and scores one prompt."""
        async with self._places:
            (prompt, row), group = self.questions[index], self._set.group(index)
            prompts = PromptGroup(
                id=group,
                attempt=version,
                incarnation=incarnation,
                prompt=with_pictures_read(prompt),
                members=tuple(range(self._set.samples)),
                seed=group_seed(self.config.seed, group),
                not_before=version,
                temperature=self._set.temperature,
                max_new_tokens=self.config.generation.max_new_tokens,
                deadline=self.config.generation.deadline,
                tools=tuple(row.get(TOOLS) or ()),
            )
            finished: list[BatchRef] = []
            try:
                await sample_turns(self.generation, self.environment, prompts, row, finished.append)
                samples = BatchRef(tuple(sorted(BatchRef.join(finished), key=lambda row: row.member)))
                scores = list(await gather(*(scorer.score(samples, row) for scorer in self._scorers)))
                texts = await self.generation.texts(samples) if self.save is not None else []
                return _Asked(samples, scores, {text.member: text for text in texts})
            finally:
                # Also those that have not finished: the next try of the version has samples of the same names.
                names = [(group, member, version) for member in prompts.members]
                for maker in filter(None, (self.generation, self.environment)):
                    await maker.release(names, oldest=0)


def _term_means(problems: Sequence[Sequence[dict[str, float]]]) -> dict[str, float]:
    """Returns the mean of each term over prompts, the samples of each averaged first."""
    found: dict[str, list[float]] = {}
    for samples in problems:
        for name in dict.fromkeys(name for terms in samples for name in terms):
            found.setdefault(name, []).append(fmean(terms[name] for terms in samples if name in terms))
    return {name: fmean(values) for name, values in found.items()}


def _known(scores: Sequence[Score]) -> Known:
    return [score.reward for score in scores]


def summary(version: int, rewards: Sequence[Known], costs: Sequence[Known] | None, seconds: float) -> Evaluation:
    """Returns mean and standard error over prompts; a prompt without any scorable sample does not count."""
    scored = _means(rewards)
    mean = fmean(scored) if scored else math.nan
    stderr = stdev(scored) / math.sqrt(len(scored)) if len(scored) > 1 else math.nan
    cost = None if costs is None else fmean(_means(costs) or [math.nan])
    unscorable = sum(known is None for each in (*rewards, *(costs or ())) for known in each)
    return Evaluation(version, len(scored), mean, stderr, cost, unscorable, seconds)


def _means(prompts: Sequence[Known]) -> list[float]:
    return [fmean(known) for each in prompts if (known := [one for one in each if one is not None])]
