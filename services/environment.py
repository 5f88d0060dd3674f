"""Answers the turns of episodes with the environment of the user, which runs in children that can be killed.

    step ── read the row ── what the policy said ──> child ──> observation ── the same row, with it ── stored here

An episode that no child knows is played again from its transcript, and what the environment answers must be the same.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from asyncrl.concurrency import gather
from asyncrl.config.gate_config import GateConfig
from asyncrl.engines.models.model_families import recorded_columns
from asyncrl.environments.episode_pool import EpisodePool, Play, Played
from asyncrl.environments.loading import EnvironmentSpec, contained
from asyncrl.environments.transcript import (
    CAUSE,
    FAILED,
    FAILED_EPISODES,
    Transcript,
    answers_in,
    counted_metrics,
    opened_in,
    read_transcript,
    said_in,
    sampled_answers,
    token_pieces,
    token_texts,
    transcript_column,
    turn_counts,
    with_info,
    without_info,
)
from asyncrl.errors import AsyncrlError, EnvironmentFailed, Retryable
from asyncrl.fleet.worker.service import WorkerContext
from asyncrl.lanes.data.row_store import bytes_of_row
from asyncrl.protocols.batch import NO_ROOM, Array, BatchRef, RowRef, SampleName, episode_columns
from asyncrl.protocols.messages import Opening, PromptGroup
from asyncrl.protocols.prompt_row import PackedRow, PromptRow
from asyncrl.protocols.seeds import group_seed
from asyncrl.protocols.service_contracts import Environment
from asyncrl.services.pooled_service import PooledService
from asyncrl.tasks.prompt_rows import with_system
from asyncrl.telemetry.run_directory import RunDirectory

EXCERPT = 200
"""Characters of a prompt that an error quotes."""
TOKEN_BYTES = 256
"""Bytes of the longest token of usual tokenizers, a row of blanks; what a row could take costs no memory."""
JSON_BYTES = 8
ANSWER_BYTES = 1024
"""Bytes in JSON of a byte of text at most, and of what surrounds an answer."""
RESET_ADVICE = (
    "mend {}, or remove such rows from task.prompts; "
    'environment.on_error = "zero" or "ignore" drops groups whose episodes cannot begin'
)
"""Advice where no episode begins."""
LONGEST_CAUSE = 600
"""Characters of a line that a sample keeps of a failure."""


@dataclass(slots=True)
class EpisodeState:
    """Holds what this worker knows of an episode. name: the one that the children know it by. rewards: of the turns
    answered so far. answered: its newest row. said: hash of what the policy had said by then. answering: the call that
    answers it now."""

    name: SampleName
    rewards: list[float] = field(default_factory=list)
    seconds: float = 0.0
    answered: RowRef | None = None
    said: int = 0
    answering: "asyncio.Task[RowRef | AsyncrlError] | None" = None


class EnvironmentService(PooledService, Environment):
    """Stores one row for each sample: all columns of the generator's, with `transcript` and `turn_rewards`."""

    _pool: EpisodePool

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        config = context.config
        self._section = config.environment
        self._groups: dict[int, dict[SampleName, EpisodeState]] = {}
        self._openings: dict[tuple[int, int], str | Transcript] = {}
        spec = EnvironmentSpec.of(config)
        spec, containment = contained(spec, self.containment(spec.named) if spec.is_users else None)
        self._pool = EpisodePool(
            spec,
            context.tasks,
            workers=self._section.workers,
            deadline=self._section.deadline,
            start_deadline=config.fleet.start_deadline,
            printed=RunDirectory(context.facts.run_dir).printed_by(f"environment{context.spec.replica}"),
            unclosed=self._unclosed,
            containment=containment,
            variables=config.children.variables,
        )
        self._text_of: Callable[[int], str] = str
        counted = ("answers", "failed", "replayed", "unclosed", FAILED_EPISODES, *counted_metrics(self._section.use))
        self.counters = dict.fromkeys(counted, 0.0)

    async def start(self) -> None:
        config = self.context.config
        section = self._section
        # Beside the rows of the run, one of each sample that an evaluation has in work.
        evaluated = max(config.generation.slots * config.evaluate.replicas, config.evaluate.samples)
        slots = GateConfig.of(config).row_slots + evaluated
        text = config.generation.max_new_tokens * TOKEN_BYTES
        answer = JSON_BYTES * section.max_bytes + ANSWER_BYTES
        transcript = JSON_BYTES * TOKEN_BYTES * section.max_tokens + section.max_turns * answer
        sizes = (config.task.max_prompt_tokens, section.max_tokens, text, section.max_turns, transcript)
        columns = episode_columns(*sizes)
        tokens = config.task.max_prompt_tokens + section.max_tokens
        columns |= recorded_columns(config, self.context.facts.model_dir, tokens)
        self.rows = self.context.open_rows(slots, bytes_of_row(columns))
        await super().start()
        if self._pool.takes_sampled:
            self._text_of = await asyncio.to_thread(token_texts, self.context.facts.model_dir)
            self._pieces_of = await asyncio.to_thread(token_pieces, self.context.facts.model_dir)

    async def reset(self, prompts: PromptGroup, row: dict[str, Any] | PackedRow) -> Opening:
        names = [(prompts.id, member, prompts.attempt) for member in prompts.members]
        if not names:
            return Opening(prompts.prompt)
        for name in names:
            self._state(name)
        packed = _packed(row)
        played = await self._pool.play(Play(names[0], packed, prompts.seed, ()))
        if played.error:
            text = self._failure(names[0], packed, played)
            what = "the program" if EnvironmentSpec.of(self.context.config).is_of_agents else "`reset`"
            advice = RESET_ADVICE.format(what)
            raise EnvironmentFailed(f"{text}\n{advice}") if self._section.on_error == "fail" else Retryable(text)
        answer = played.answers[0]
        self._openings[prompts.id, prompts.attempt] = answer["text"]
        where = f"environment {self._section.use} began group {prompts.id}"
        prompt = with_system(answer["text"], self.context.config.task.system, where)
        if not prompt:
            raise EnvironmentFailed(f"{where} with an empty text: return one from `reset` that the policy can answer")
        return Opening(prompt, tuple(answer["tools"]))

    async def step(self, samples: BatchRef, row: dict[str, Any] | PackedRow) -> BatchRef:
        packed = _packed(row)
        return BatchRef(tuple(await gather(*(self._answer_once(sample, packed) for sample in samples))))

    async def release(self, samples: list[SampleName], oldest: int) -> None:
        await super().release(samples, oldest)
        over = [name for group in self._groups if 0 <= group < oldest for name in self._groups[group]]
        for group, member, attempt in samples:
            known = self._groups.get(group, {})
            over += [name for name in known if name[1] == member and name[2] <= attempt]
        episodes: list[SampleName] = []
        for name in dict.fromkeys(over):
            own = self._groups[name[0]]
            episodes += [name, own.pop(name).name]  # `reset` began one by the first, whichever went on.
            if not own:
                del self._groups[name[0]]
            if not any(each[2] == name[2] for each in own):
                self._openings.pop((name[0], name[2]), None)
        self._pool.forget(episodes)

    def _state(self, name: SampleName) -> EpisodeState:
        own = self._groups.setdefault(name[0], {})
        if name not in own:
            own[name] = EpisodeState(name)
        return own[name]

    def _take_over(self, state: EpisodeState, sample: RowRef, before: tuple[str, ...]) -> None:
        """Goes on with the episode of an earlier attempt, if that is where this sample stands. before: what the policy
        said before the newest turn; an attempt that began anew may have said something else."""
        if state.answered is not None:
            return
        for (_, member, attempt), earlier in self._groups.get(sample.group, {}).items():
            same = member == sample.member and attempt < sample.attempt and earlier.answering is None
            if same and earlier.answered is not None and earlier.said == hash(before):
                state.name, state.rewards, state.seconds = earlier.name, list(earlier.rewards), earlier.seconds

    async def _answer_once(self, sample: RowRef, row: PackedRow) -> RowRef:
        """Answers a turn. A repeated call gets the answer of the first one, which goes on without its caller."""
        state = self._state(sample.name)
        if state.answered is not None and state.answered.turns == sample.turns:
            return state.answered
        if state.answering is None:
            work = _caught(state, self._answer(state, sample, row))
            state.answering = self.context.tasks.create_task(work, name=f"episode {sample.name}")
        found = await asyncio.shield(state.answering)
        if isinstance(found, AsyncrlError):
            raise found
        return found

    async def _answer(self, state: EpisodeState, sample: RowRef, row: PackedRow) -> RowRef:
        """Plays the newest turn of a sample, and stores its row with the observation."""
        names = [name for place in sample.places for name in place.columns]
        found = await self.context.reader.read(BatchRef((sample,)), names)
        columns: dict[str, Array] = {name: found[name][0] for name in names}
        transcript = read_transcript(columns["transcript"])
        said = said_in(transcript)
        self._take_over(state, sample, said[:-1])
        sampled = (
            sampled_answers(columns, sample.finish, self._text_of, self._pieces_of) if self._pool.takes_sampled else []
        )
        played = await self._play(state, sample, row, transcript, tuple(sampled))
        state.seconds += new_seconds(state, played)
        if played.error:
            finish = FAILED
            reward = 0.0
            self._report(sample.name, row, played)
            transcript = with_info(transcript, {CAUSE: self._cause(sample.name, played)})
        else:
            newest = played.answers[sample.turns]
            if sample.group >= 0:  # Others are of the evaluation.
                self.add_to_counters(**turn_counts(self._section.use, transcript, newest["info"]))
            transcript = with_info(transcript + newest["text"], newest["info"])
            finish = self._finish(sample, state, newest)
            reward = newest["reward"]
        state.rewards = [*self._rewards_before(state, sample, played), reward]
        columns["transcript"] = transcript_column(transcript)
        columns["turn_rewards"] = np.array(state.rewards, np.float32)
        state.answered = sample._replace(finish=finish, places=(self.keep(sample.name, columns),))
        state.said = hash(said)
        if finish:
            self._pool.forget([state.name])
        return state.answered

    async def _play(
        self,
        state: EpisodeState,
        sample: RowRef,
        row: PackedRow,
        transcript: Transcript,
        sampled: tuple[dict[str, Any], ...],
    ) -> Played:
        """Plays the newest turn. The children forget an episode that does not stand where the transcript does, with
        which no attempt may go on, and one whose sample was released meanwhile, which no later release names."""
        seed = group_seed(self.context.config.seed, sample.group)
        goes_on = False
        try:
            with self.context.occupancy.computing():
                play = Play(state.name, row, seed, said_in(transcript), sampled, opened_in(transcript))
                played = await self._pool.play(play)
            self.add_to_counters(answers=len(played.answers))
            self._check_replay(sample, transcript, played)
            goes_on = self._groups.get(sample.group, {}).get(sample.name) is state
        finally:
            if not goes_on:
                self._pool.forget([state.name])
        return played

    def _rewards_before(self, state: EpisodeState, sample: RowRef, played: Played) -> list[float]:
        """Returns the rewards of the turns before the newest one, of which a replay gives those that are not known."""
        known = dict(enumerate(state.rewards, start=1)) | {
            turn: answer["reward"] for turn, answer in played.answers.items() if turn
        }
        return [known.get(turn, 0.0) for turn in range(1, sample.turns)]

    def _finish(self, sample: RowRef, state: EpisodeState, answer: dict[str, Any]) -> str:
        """Returns why the episode ends with this answer; "" when it goes on."""
        if answer["done"]:
            return "stop"
        if sample.tokens + sample.given >= self._section.max_tokens:
            return NO_ROOM
        if sample.turns >= self._section.max_turns:
            return "turn_limit"
        return "time_limit" if state.seconds > self._section.max_seconds else ""

    def _check_replay(self, sample: RowRef, transcript: Transcript, played: Played) -> None:
        """Raises EnvironmentFailed when the seed does not determine the opening, and Retryable when an episode that was
        played again came out otherwise."""
        opening = self._openings.get((sample.group, sample.attempt))
        if opening is not None and 0 in played.answers and played.answers[0]["text"] != opening:
            raise EnvironmentFailed(
                f"environment {self._section.use}: `reset` gave two openings for one row and one seed: draw all that "
                f"is random from `seed`. First {opening!r:.{EXCERPT}}, then {played.answers[0]['text']!r:.{EXCERPT}}"
            )
        for turn, before in enumerate(answers_in(transcript)[:-1], start=1):
            if turn in played.answers and played.answers[turn]["text"] != without_info(before):
                raise Retryable(
                    f"environment {self._section.use} was played again for sample {sample.key}, and answered turn "
                    f"{turn} with {played.answers[turn]['text']!r:.{EXCERPT}} in place of {before!r:.{EXCERPT}}"
                )
        self.counters["replayed"] += sum(0 < turn < sample.turns for turn in played.answers)

    def _report(self, name: SampleName, row: PackedRow, played: Played) -> None:
        """Counts and logs a failure; raises it under `on_error = "fail"`."""
        self.counters["failed"] += 1
        self.counters[FAILED_EPISODES] += name[0] >= 0
        text = self._failure(name, row, played)
        if self._section.on_error == "fail":
            advice = 'environment.on_error = "zero" or "ignore" lets the run go on'
            raise EnvironmentFailed(f"{text}\n{advice}")
        self.context.log.warning("environment failed", group=name[0], member=name[1], error=text)

    def _unclosed(self, why: str) -> None:
        """Counts an environment that could not be closed, and logs the first one. Its episode ended all the same."""
        self.counters["unclosed"] += 1
        if self.counters["unclosed"] == 1:
            self.context.log.warning("environment could not be closed", environment=self._section.use, error=why)

    def _failure(self, name: SampleName, row: PackedRow, played: Played) -> str:
        prompt = PromptRow.of(row).get("prompt")
        lines = [self._where(name) + played.error, f"  prompt of its row: {prompt!r:.{EXCERPT}}"]
        return "\n".join([*lines, played.traceback.rstrip()] if played.traceback else lines)

    def _where(self, name: SampleName) -> str:
        return f"environment {self._section.use} on member {name[1]} of group {name[0]}: "

    def _cause(self, name: SampleName, played: Played) -> str:
        """Returns what failed and the first line of the user's code that led there."""
        lines = [self._where(name) + played.error, *played.traceback.splitlines()[1:3]]
        return "\n".join(line[:LONGEST_CAUSE] for line in lines)


def _packed(row: dict[str, Any] | PackedRow) -> PackedRow:
    return row if isinstance(row, PackedRow) else PromptRow.of(row).packed


def new_seconds(state: EpisodeState, played: Played) -> float:
    """Returns the seconds of turns that were not answered before: those of a replay were counted then."""
    known = range(len(state.rewards) + 1) if state.rewards else ()
    return float(sum(answer["seconds"] for turn, answer in played.answers.items() if turn not in known))


async def _caught(state: EpisodeState, work: Coroutine[Any, Any, RowRef]) -> RowRef | AsyncrlError:
    """Answers a turn, whether or not its caller still waits. Returns errors, which a task of the worker must not
    raise."""
    try:
        return await work
    except AsyncrlError as error:
        return error
    finally:
        state.answering = None
