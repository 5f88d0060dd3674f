"""Runs a few rows of an experiment through prompt, model and rewards on a fleet without a trainer, and shows each."""

import asyncio
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from asyncrl.concurrency import gather
from asyncrl.config.problems import refuse
from asyncrl.config.schema import Config, Scorer
from asyncrl.controller.training_run import Questions
from asyncrl.deploy.checks.model_checks import content_problems
from asyncrl.deploy.checks.run_prompts import prompt_tokenizer, questions_of, read_prompts
from asyncrl.deploy.standalone_evaluation import VERSION, scoring_fleet
from asyncrl.engines.generation.tokenization import TokenizerWithStops
from asyncrl.engines.models.model_preparation import prepare
from asyncrl.environments.transcript import FINISH, said_in
from asyncrl.fleet.episode_turns import sample_turns
from asyncrl.fleet.fleet import RunningFleet
from asyncrl.protocols.answer_text import ends_in_thoughts, split_thoughts
from asyncrl.protocols.batch import BatchRef
from asyncrl.protocols.messages import PromptGroup, SampleText, Score
from asyncrl.protocols.seeds import group_seed
from asyncrl.protocols.service_contracts import Environment, Generation, Reward
from asyncrl.tasks.chat_messages import TOOLS
from asyncrl.tasks.prompt_rows import Row
from asyncrl.tasks.reward_trial import try_rewards

Say = Callable[[str], None]
COLUMN_CHARACTERS = 300
"""Characters of a column of the row that are shown."""


async def try_rows(config: Config, places: Mapping[str, str], rows: int, say: Say) -> None:
    """Tries the first `rows` groups of a run. places: where the values of keys come from. say: gets what is shown, as
    soon as it is known. Raises what a run would raise."""
    sets = await asyncio.to_thread(read_prompts, config)
    for note in await try_rewards(config, sets.by_key(config)):
        say(f"warning: {note}")
    with tempfile.TemporaryDirectory(prefix="asyncrl-try-") as scratch:
        model = await prepare(config, Path(scratch) / "model", say)
        refuse(problems := list(content_problems(model, config.generation.stop)))
        for problem in problems:
            say(f"warning: {problem}")
        longest = Path(scratch) / "longest.jsonl"
        questions = await asyncio.to_thread(questions_of, config, sets, model, longest, places, say)
        tokenizer = await asyncio.to_thread(prompt_tokenizer, config, model)
        async with scoring_fleet(model, with_whole_groups(config)) as running:
            trial = _Trial(config, questions, tokenizer, running, say)
            for group in range(rows):
                await trial.show(group)


def with_whole_groups(config: Config) -> Config:
    """Returns a config whose held-out groups are those of training in prompts and size: the groups of a trial have the
    ids of held-out ones."""
    whole: dict[str, object] = {
        "prompts": config.task.prompts if config.evaluate.is_on else "",
        "sets": {},
        "samples": config.task.samples_per_prompt,
        "temperature": config.generation.temperature,
    }
    return config.model_copy(update={"evaluate": config.evaluate.model_copy(update=whole)})


class _Trial:
    """Samples, scores and shows one group at a time: one of its answers, or all where rewards compare them, and whether
    the group would teach."""

    def __init__(
        self, config: Config, questions: Questions, tokenizer: TokenizerWithStops, running: RunningFleet, say: Say
    ) -> None:
        self._config = config
        self._questions = questions
        self._tokenizer = tokenizer
        self._say = say
        self._generation = running.handle("evaluation", Generation)
        self._environment = running.handle("environment", Environment) if config.environment.use else None
        self._scorers = {name: running.handle(name, Reward) for name in config.scorers}
        compares = any(each.group for section in config.scorers.values() for each in section.functions)
        self._members = tuple(range(config.task.samples_per_prompt))
        self._shown = len(self._members) if compares else 1

    async def show(self, group: int) -> None:
        row = self._questions.training(group)
        self._say(f"\n{self._questions.where(group)}")
        if self._environment is None:  # An environment begins with a prompt of its own.
            ids = self._tokenizer.prompt_ids(row.prompt, row.columns.get(TOOLS) or ())
            shown = self._tokenizer.decode(ids, skip_special_tokens=False)
            self._say(_block(f"prompt, {len(ids)} tokens", shown))
        for name, value in row.columns.items():
            if name not in (TOOLS, "prompt", self._config.task.columns.get("prompt")):
                self._say(f"column {name}: {_shortened(repr(value))}")
        prompts = self._request(group, row)
        try:
            await self._show_samples(prompts, row)
        finally:
            names = [(prompts.id, member, prompts.attempt) for member in prompts.members]
            for maker in filter(None, (self._generation, self._environment)):
                await maker.release(names, oldest=0)

    async def _show_samples(self, prompts: PromptGroup, row: Row) -> None:
        finished: list[BatchRef] = []
        await sample_turns(self._generation, self._environment, prompts, row.columns, finished.append)
        samples = BatchRef(tuple(sorted(BatchRef.join(finished), key=lambda ref: ref.member)))
        texts = {text.member: text for text in await self._generation.texts(samples)}
        for ref in samples.rows[: self._shown]:
            for block in _answer(texts[ref.member], f"{ref.tokens} tokens, ended by {ref.finish}"):
                self._say(block)
        scored = await gather(*(scorer.score(samples, row.columns) for scorer in self._scorers.values()))
        for name, scores in zip(self._scorers, scored, strict=True):
            for score in scores[: self._shown]:
                self._say(self._score(name, score))
        self._say(group_in_words(samples, [texts[ref.member] for ref in samples], scored[0]))

    def _request(self, group: int, row: Row) -> PromptGroup:
        generation = self._config.generation
        return PromptGroup(
            id=-1 - group % self._config.evaluate.size,  # Ids of [evaluate], whose rewards are those of the run.
            attempt=group,
            incarnation=0,
            prompt=row.prompt,
            members=self._members,
            seed=group_seed(self._config.seed, group),
            not_before=VERSION,
            temperature=generation.temperature,
            max_new_tokens=generation.max_new_tokens,
            deadline=generation.deadline,
            tools=tuple(row.columns.get(TOOLS) or ()),
        )

    def _score(self, name: Scorer, score: Score) -> str:
        """Returns the score and each of its terms with its weight."""
        section = self._config.scorers[name]
        weights = {each.term: each.weight for each in section.functions}
        lines = [
            f"  {term} = {value + 0:g} (weight {weights.get(term.partition('/')[0], weights.get(term, 1)):g})"
            for term, value in score.terms.items()
        ]
        total = "cannot be scored" if score.reward is None else f"{score.reward:g}"
        errors = [f"  {line}" for line in score.error.splitlines()]
        return "\n".join([f"{name}: {total}", *lines, *errors])


def group_in_words(samples: BatchRef, texts: Sequence[SampleText], scores: Sequence[Score]) -> str:
    """Says how the samples of a group differ, and what keeps them from teaching anything."""
    rewards = [score.reward for score in scores if score.reward is not None]
    different = len({said_in(text.turns) or text.text for text in texts})
    spread = f"rewards {min(rewards):g} to {max(rewards):g} (mean {fmean(rewards):.3g})" if rewards else "no rewards"
    said = [f"group of {len(samples)} samples: {different} different texts, {spread}"]
    if len(samples) > 1 and different == 1:
        said.append("  all identical: raise generation.temperature")
    if all(ref.truncated for ref in samples):
        said.append("  all cut off: raise generation.max_new_tokens, or write generation.stop")
    if len(rewards) > 1 and len(set(rewards)) == 1:
        said.append("  all equal: under a group baseline such rewards teach nothing")
    return "\n".join(said)


def _shortened(text: str) -> str:
    return text if len(text) <= COLUMN_CHARACTERS else f"{text[:COLUMN_CHARACTERS]}..."


def _answer(text: SampleText, described: str) -> Iterator[str]:
    """Yields what was sampled: an answer, or the turns of an episode."""
    if not text.turns:
        yield _block(f"answer, {described}", text.text)
        if text.text.strip() and not split_thoughts(text.text, ends_in_thoughts(text.prompt))[1]:
            yield "  its thoughts do not end, so that rewards read no answer: raise generation.max_new_tokens"
        return
    yield _block("prompt of the environment", text.prompt)
    for turn in text.turns:
        ended = f", ended by {turn[FINISH]}" if FINISH in turn else ""
        yield _block(f"{turn['role']}{ended}", str(turn["content"]))
    yield _block("all that the model saw before its last answer", text.context)
    yield f"episode, {described}, rewards of the environment {', '.join(f'{each:g}' for each in text.turn_rewards)}"


def _block(title: str, text: str) -> str:
    return "\n".join([f"{title}:", *(f"  {line}" for line in text.split("\n"))])
