"""Evaluates versions beside training: on held-out prompts, or on episodes of a policy that acts.

    ask ──> EvaluationSchedule ── copies the weights ──> Evaluator, or EpisodeEvaluator ──> Evaluation ──> done
                 one version at a time                        └──> answers, in the folder `evaluations` of the run

Rewards and costs are those of the run, or those of the held-out set.
"""

import asyncio
import json
import math
import os
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple, Protocol, TypeAlias

from asyncrl.concurrency import gather, running_timeout
from asyncrl.config.schema import Config
from asyncrl.config.user_code import suggestion
from asyncrl.controller.observers.step_metrics import COSTS
from asyncrl.errors import ConfigError, DeadlineExceeded, Refused, Retryable, WeightsError
from asyncrl.fleet.episode_turns import sample_turns
from asyncrl.fleet.fleet import Fleet
from asyncrl.objectives.pass_at_k import Rate, mean_with_interval, pass_at_k, rate_over
from asyncrl.protocols.batch import BatchRef
from asyncrl.protocols.messages import PromptGroup, Published, SampleText, Score
from asyncrl.protocols.seeds import group_seed
from asyncrl.protocols.service_contracts import Environment, Generation, Reward
from asyncrl.rewards.templates import compiles, passes_tests, reaches
from asyncrl.tasks.chat_messages import TOOLS, Messages
from asyncrl.tasks.pictures import with_pictures_read

# ---- rates of programs that compile and that pass their tests, from the terms of rewards ---------------------------


COMPILES = compiles.__name__
PASSES = passes_tests.__name__
"""Names of the terms, if `name` does not give them others: 1 if a program compiles; the share of its tests that it
passes."""
Terms = Mapping[str, float]


def _programs(samples: Sequence[Terms]) -> tuple[list[float], list[bool]]:
    """Returns of the samples that are programs which compile, and which pass all their tests."""
    compiled = [terms[COMPILES] for terms in samples if COMPILES in terms]
    return compiled, [reaches(terms[PASSES], 1.0) for terms in samples if PASSES in terms]


def code_metrics(samples: Sequence[Terms]) -> dict[str, float]:
    """Computes `code/*` of the samples of one step; none where their rewards are not about programs."""
    compiled, passed = _programs(samples)
    return {
        **({"code/compile_rate": fmean(compiled)} if compiled else {}),
        **({"code/pass_rate": fmean(passed)} if passed else {}),
    }


def with_interval(name: str, rate: Rate) -> dict[str, float]:
    return {name: rate.mean, f"{name}_low": rate.low, f"{name}_high": rate.high}


@dataclass(frozen=True, slots=True)
class CodeRates:
    """The rates of held-out programs over problems. pass_at: by k, a power of two up to the samples of a problem."""

    compile_rate: Rate | None
    pass_at: dict[int, Rate]

    @classmethod
    def of(cls, problems: Sequence[Sequence[Terms]]) -> "CodeRates | None":
        """Computes the rates from the terms of each problem's samples; None where none are about programs."""
        programs = [_programs(each) for each in problems]
        rates = [fmean(compiled) for compiled, _ in programs if compiled]
        passed = [passed for _, passed in programs if passed]
        found = cls(rate_over(rates) if rates else None, dict(pass_rates(passed)))
        return found if found.compile_rate or found.pass_at else None

    def metrics(self) -> dict[str, float]:
        found = {} if self.compile_rate is None else with_interval("eval/code/compile_rate", self.compile_rate)
        for k, rate in self.pass_at.items():
            found |= with_interval(f"eval/code/pass_at_{k}", rate)
        return found

    def __str__(self) -> str:
        named = {f"pass@{k}": rate for k, rate in self.pass_at.items()}
        if self.compile_rate is not None:
            named["compiles"] = self.compile_rate
        return ", ".join(f"{name} {rate.mean:.3f} [{rate.low:.3f} - {rate.high:.3f}]" for name, rate in named.items())


def pass_rates(problems: Sequence[Sequence[bool]]) -> Iterator[tuple[int, Rate]]:
    """Yields pass@k for each power of two that every problem has samples for."""
    k = 1
    while problems and k <= min(map(len, problems)):
        yield k, rate_over([pass_at_k(len(passed), sum(passed), k) for passed in problems])
        k *= 2


# ---- answers on disk: JSON lines, of each set the newest versions --------------------------------------------------


SaveResults: TypeAlias = Callable[[str, int, Sequence[Any]], None]
"""Takes what is kept of an evaluation: the name of its set, the version, and dataclasses of answers or episodes."""


@dataclass(frozen=True, slots=True)
class HeldOutAnswer:
    """One answer. set: name of its set, "" for that of `[evaluate]`. question: number of the prompt. turns: of an
    episode. terms: each function's own value. row: the other columns of the prompt's row."""

    version: int
    set: str
    question: int
    member: int
    prompt: str
    text: str
    turns: list[dict[str, Any]]
    finish: str
    tokens: int
    reward: float | None
    cost: float | None
    terms: Mapping[str, float]
    row: Mapping[str, Any]


def write_answers(path: Path, answers: Sequence[Any]) -> None:
    """Writes one object a line; the file appears at once. Raises OSError."""
    unfinished = path.with_name(f"{path.name}.part")
    with unfinished.open("w", encoding="utf-8") as file:
        for answer in answers:
            file.write(json.dumps(asdict(answer), ensure_ascii=False, default=str) + "\n")
    os.replace(unfinished, path)


@dataclass(frozen=True, slots=True)
class AnswersFolder:
    """The folder `evaluations` of a run: VERSION.jsonl, NAME/VERSION.jsonl of other sets, and VERSION.gif of a policy
    that acts. keep: files of each set that stay."""

    path: Path
    keep: int

    def save(self, name: str, version: int, answers: Sequence[Any]) -> None:
        """Writes the answers of one evaluation, and removes old ones. Raises OSError."""
        folder = self.path / name
        folder.mkdir(parents=True, exist_ok=True)
        write_answers(folder / f"{version}.jsonl", answers)
        versions = sorted(int(each.stem) for each in folder.glob("*.jsonl") if each.stem.isdecimal())
        for old in versions[: -self.keep]:
            (folder / f"{old}.jsonl").unlink()
            (folder / f"{old}.gif").unlink(missing_ok=True)


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
        found = {
            (f"eval/{term}" if term.startswith(COSTS) else f"eval/reward/{term}"): value
            for term, value in self.terms.items()
        }
        for k, rate in self.pass_at.items():
            found |= with_interval(f"eval/pass_at_{k}", rate)
        found |= {"eval/reward/mean": self.mean, "eval/reward/stderr": self.stderr}
        if self.cost is not None:
            found["eval/cost/mean"] = self.cost
        if self.code is not None:
            found |= self.code.metrics()
        return {self.metric(name.removeprefix("eval/")): value for name, value in found.items()}

    def metric(self, name: str) -> str:
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


def request_of(config: Config, group: int, members: int, version: int, incarnation: int, **how: Any) -> PromptGroup:
    """Returns the request for a group sampled with one version. Groups have negative ids, which groups of training
    never have."""
    return PromptGroup(
        id=group,
        attempt=version,
        incarnation=incarnation,
        members=tuple(range(members)),
        seed=group_seed(config.seed, group),
        not_before=version,
        deadline=config.generation.deadline,
        **how,
    )


@asynccontextmanager
async def sampled(
    generation: Generation, environment: Environment | None, request: PromptGroup, row: dict[str, Any]
) -> AsyncIterator[BatchRef]:
    """Yields the samples of a request by member, and frees their rows afterwards."""
    finished: list[BatchRef] = []
    try:
        await sample_turns(generation, environment, request, row, finished.append)
        yield BatchRef(tuple(sorted(BatchRef.join(finished), key=lambda row: row.member)))
    finally:
        # Also those that have not finished: the next try of the version has samples of the same names.
        names = [(request.id, member, request.attempt) for member in request.members]
        for maker in filter(None, (generation, environment)):
            await maker.release(names, oldest=0)


class _Asked(NamedTuple):
    """One question with its samples. scores: of rewards and, if there are costs, of costs."""

    samples: BatchRef
    scores: list[list[Score]]
    texts: dict[int, SampleText]

    def terms(self) -> list[dict[str, float]]:
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
    no texts are read."""

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
        known = ([[score.reward for score in scores] for scores in each.scores] for each in found)
        rewards, *costs = zip(*known, strict=True)
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
        prompt, row = self.questions[index]
        async with self._places:
            request = request_of(
                self.config,
                self._set.group(index),
                self._set.samples,
                version,
                incarnation,
                prompt=with_pictures_read(prompt),
                temperature=self._set.temperature,
                max_new_tokens=self.config.generation.max_new_tokens,
                tools=tuple(row.get(TOOLS) or ()),
            )
            async with sampled(self.generation, self.environment, request, row) as samples:
                scores = list(await gather(*(scorer.score(samples, row) for scorer in self._scorers)))
                texts = await self.generation.texts(samples) if self.save is not None else []
                return _Asked(samples, scores, {text.member: text for text in texts})


def _term_means(problems: Sequence[Sequence[dict[str, float]]]) -> dict[str, float]:
    """Returns the mean of each term over prompts, the samples of each averaged first."""
    found: dict[str, list[float]] = {}
    for samples in problems:
        for name in dict.fromkeys(name for terms in samples for name in terms):
            found.setdefault(name, []).append(fmean(terms[name] for terms in samples if name in terms))
    return {name: fmean(values) for name, values in found.items()}


def summary(version: int, rewards: Sequence[Known], costs: Sequence[Known] | None, seconds: float) -> Evaluation:
    """Returns mean and standard error over prompts; a prompt without any scorable sample does not count."""
    scored = _means(rewards)
    mean = fmean(scored) if scored else math.nan
    cost = None if costs is None else fmean(_means(costs) or [math.nan])
    unscorable = sum(known is None for each in (*rewards, *(costs or ())) for known in each)
    return Evaluation(version, len(scored), mean, standard_error(scored), cost, unscorable, seconds)


def standard_error(values: Sequence[float]) -> float:
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def _means(prompts: Sequence[Known]) -> list[float]:
    return [fmean(known) for each in prompts if (known := [one for one in each if one is not None])]


# ---- a policy that acts: returns and lengths of episodes with the same seeds each time -----------------------------


EPISODES = -1
"""Group of the episodes of an evaluation. Groups of training have none below 0."""


@dataclass(frozen=True, slots=True)
class HeldOutEpisode:
    """One episode of an evaluation. reward: its return; None where its environment lost it. finish: why it ended:
    terminated, truncated, lost or time_limit."""

    version: int
    episode: int
    reward: float | None
    steps: int
    finish: str


@dataclass(frozen=True, slots=True)
class EpisodesEvaluation(Evaluation):
    """The result of an evaluation of a policy that acts. prompts: episodes with a return; mean, stderr: of returns;
    low, high: interval of 95 % of their mean; unscorable: episodes that their environment lost; length: mean of steps;
    cut_off: episodes that the deadline ended; undrawn: why there are no pictures, with the first evaluation only."""

    low: float = math.nan
    high: float = math.nan
    length: float = math.nan
    cut_off: int = 0
    undrawn: str = ""

    def metrics(self) -> dict[str, float]:
        found = {"mean": self.mean, "stderr": self.stderr, "low": self.low, "high": self.high}
        named = {f"eval/return/{name}": value for name, value in found.items()}
        lost = {"eval/lost_episodes": float(self.unscorable), "eval/cut_off_episodes": float(self.cut_off)}
        return {**named, "eval/length/mean": self.length, **lost}

    def __str__(self) -> str:
        interval = "" if math.isnan(self.low) else f" [{self.low:.5g} - {self.high:.5g}]"
        lost = f", {self.unscorable} lost" if self.unscorable else ""
        cut = f", {self.cut_off} cut off after generation.deadline" if self.cut_off else ""
        undrawn = f"; there are no pictures: {self.undrawn}" if self.undrawn else ""
        return (
            f"evaluated, version {self.version}: return {self.mean:.5g}{interval} over {self.prompts} episodes of "
            f"{self.length:.1f} steps{lost}{cut}, {self.seconds:.1f} s{undrawn}"
        )


@dataclass
class EpisodeEvaluator:
    """Plays the episodes of `evaluate.episodes` with one version. save: takes them; without it they are not kept."""

    generation: Generation
    config: Config
    save: SaveResults | None = None

    def __post_init__(self) -> None:
        self._undrawn = ""

    async def evaluate(self, version: int, incarnation: int) -> EpisodesEvaluation:
        """Evaluates one version. Raises Retryable when the worker died meanwhile."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        how: dict[str, Any] = {"prompt": "", "temperature": 0.0, "max_new_tokens": 1}
        request = request_of(self.config, EPISODES, self.config.evaluate.episodes, version, incarnation, **how)
        async with sampled(self.generation, None, request, {}) as rows:
            undrawn = "".join(text.text for text in await self.generation.texts(rows))
        if self.save is not None:
            episodes = [HeldOutEpisode(version, row.member, row.reward, row.tokens, row.finish) for row in rows]
            self.save("", version, episodes)
        found = summary_of_episodes(version, rows, loop.time() - began)
        known = self._undrawn
        self._undrawn = undrawn or self._undrawn
        return found if known else replace(found, undrawn=undrawn)


def summary_of_episodes(version: int, rows: BatchRef, seconds: float) -> EpisodesEvaluation:
    """Returns what the episodes come to; those that their environment lost count neither for return nor length."""
    whole = [row for row in rows if row.reward is not None]
    returns = [row.reward for row in whole if row.reward is not None]
    mean, low, high = mean_with_interval(returns) if returns else Rate(math.nan, math.nan, math.nan)
    return EpisodesEvaluation(
        version,
        len(whole),
        mean,
        standard_error(returns),
        None,
        len(rows) - len(whole),
        seconds,
        low=low,
        high=high,
        length=fmean(row.tokens for row in whole) if whole else math.nan,
        cut_off=sum(row.finish == "time_limit" for row in rows),
    )


# ---- when: on request, one version at a time -----------------------------------------------------------------------


READER = "evaluation"
"""Name of the reader that leases a version from the trainer while it is copied out."""


class VersionEvaluator(Protocol):
    """Evaluates versions on one set, or on its episodes."""

    async def evaluate(self, version: int, incarnation: int) -> Evaluation: ...


async def copy_weights(fleet: Fleet, published: Published, config: Config) -> None:
    """Lets the evaluation service copy out a version, leased meanwhile so that the trainer cannot overwrite it.

    Between leases the trainer may write. Raises Refused when the version was overwritten, and WeightsError when it is
    damaged, or the copy too slow.
    """
    assert fleet.evaluation is not None
    lease = config.staleness.publish_deadline + published.transfer
    deadline = config.fleet.start_deadline + config.fleet.call_deadline  # Longer than a worker's restart takes.
    loop = asyncio.get_running_loop()
    until = loop.time() + deadline
    while loop.time() < until:
        await fleet.training.using((READER,), published.version)
        try:
            async with running_timeout(lease):
                await fleet.evaluation.use_weights(published)
            return
        except (TimeoutError, DeadlineExceeded):
            continue
        finally:
            await fleet.training.detached(READER)
    raise WeightsError(
        f"weights of version {published.version} could not be copied within {deadline:g} s, in tries of "
        f"{lease:.3g} s: raise staleness.publish_deadline when a copy takes longer, or read the worker's log"
    )


@dataclass
class EvaluationSchedule:
    """Evaluates versions on request, one at a time, beside training. At most one waits: a newer one replaces it, and is
    evaluated on its sets too.

    evaluators: by the name of the set. skipped: takes each version that is not evaluated, and the reason.
    """

    fleet: Fleet
    evaluators: Mapping[str, VersionEvaluator]
    config: Config
    done: Callable[[Evaluation], None]
    skipped: Callable[[int, str], None]

    def __post_init__(self) -> None:
        self._asked: Published | None = None
        self._sets: dict[str, None] = {}
        self._running = -1
        self._changed = asyncio.Event()
        self._idle = asyncio.Lock()
        self._newest = -1
        self._finished: set[str] = set()

    @property
    def pending(self) -> set[int]:
        """Returns the versions that are evaluated now, or wait for it."""
        asked = -1 if self._asked is None else self._asked.version
        return {version for version in (self._running, asked) if version >= 0}

    def ask(self, published: Published, sets: Collection[str] | None = None) -> None:
        """Requests the evaluation of this version, after the running one, on these sets; default: on all of them."""
        if self._asked is not None and self._asked.version != published.version:
            self.skipped(self._asked.version, f"version {published.version} came before its turn")
        self._asked = published
        self._sets |= dict.fromkeys(self.evaluators if sets is None else sets)
        self._changed.set()

    async def run(self) -> None:
        while True:
            await self._changed.wait()
            await self._next()

    async def finish(self, last: Published) -> None:
        await self._next()
        self.ask(last)
        await self._next()

    async def _next(self) -> None:
        async with self._idle:
            self._changed.clear()
            published = self._asked
            if published is None:
                return
            if published.version != self._newest:
                self._finished.clear()
            sets = [name for name in self._sets if name not in self._finished]
            self._sets.clear()
            self._asked = None
            self._running = self._newest = published.version
            try:
                await self._evaluate(published, sets)
            finally:
                self._running = -1

    async def _evaluate(self, published: Published, left: list[str]) -> None:
        """Evaluates a version on these sets; tries again once when a worker dies, and skips a version that was
        overwritten."""
        for attempt in range(2 if left else 0):
            try:
                await copy_weights(self.fleet, published, self.config)
                while left:
                    self.done(await self.evaluators[left[0]].evaluate(published.version, published.incarnation))
                    self._finished.add(left.pop(0))
                return
            except (WeightsError, Refused) as error:
                self._finished.update(left)
                self.skipped(published.version, str(error))
                return
            except Retryable as error:
                if attempt:
                    self.skipped(published.version, str(error))


def schedule_of(
    fleet: Fleet,
    config: Config,
    questions: Mapping[str, Sequence[Question]],
    answers: Path,
    done: Callable[[Evaluation], None],
    skipped: Callable[[int, str], None],
) -> EvaluationSchedule | None:
    """Returns the schedule of a run; None without held-out prompts or episodes. questions: by set. answers: folder that
    gets them. done, skipped: as in EvaluationSchedule."""
    if not config.evaluate.is_on:
        return None
    assert fleet.evaluation is not None, "a run with evaluations has this service"
    folder = AnswersFolder(answers, config.evaluate.keep_answers)
    save = folder.save if folder.keep else None
    if config.acting.env:
        return EvaluationSchedule(fleet, {"": EpisodeEvaluator(fleet.evaluation, config, save)}, config, done, skipped)
    evaluators = {
        name: Evaluator(fleet.evaluation, fleet.reward, own, config, fleet.cost, fleet.environment, name, save)
        for name, own in questions.items()
    }
    return EvaluationSchedule(fleet, evaluators, config, done, skipped)
