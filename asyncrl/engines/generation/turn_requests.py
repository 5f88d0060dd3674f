"""Makes the requests of turns: the first one from the prompt of a group, each later one from the row of its sample."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from asyncrl.engines.generation.engine_interface import Completion, SampleRequest
from asyncrl.engines.generation.tokenization import Message, TokenizerWithStops, TurnRenderer
from asyncrl.engines.models.prompt_pictures import PromptPictures
from asyncrl.environments.transcript import (
    CONTEXT,
    FINISH,
    POLICY,
    Quote,
    begins_with_prompt,
    begun_context,
    conversations,
    policy_message,
)
from asyncrl.errors import TaskError
from asyncrl.protocols.batch import EXPERTS, NO_ROOM, Array, Batch, RowRef
from asyncrl.protocols.messages import PromptGroup
from asyncrl.protocols.seeds import member_seed
from asyncrl.tasks.prompt_lengths import TokenBudget
from asyncrl.tasks.turn_template import Tools

# A sample in turns: what the policy sampled and what its environment gave, as the columns of a row.
#
# response_ids s s s g g s s g s s s s: sampled, g: given spans 3 2 2 1 3 0 for each turn, the tokens sampled and
# those given after it logprobs . . . . . . . . of sampled tokens only, as are versions
#
# Where an environment begins a new context, the span that it gave is negative: it is the prompt of what follows,
# which sees nothing of before.


Ids = NDArray[np.int32]
ROW = ("prompt_ids", "response_ids", "logprobs", "versions", "spans", "transcript")
"""Columns that the next turn of a trajectory is made from."""


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """The turns of a sample so far. transcript: the messages after the prompt, the policy's as "assistant". experts: of
    all tokens of prompt and response, flat, where they are recorded."""

    prompt: Ids
    response: Ids
    logprobs: NDArray[np.float32]
    versions: Ids
    spans: Ids
    transcript: tuple[Message, ...]
    experts: Array | None = None

    @classmethod
    def begin(cls, prompt: Ids) -> "Trajectory":
        nothing = np.zeros(0, np.int32)
        return cls(prompt, nothing, np.zeros(0, np.float32), nothing, nothing, ())

    @classmethod
    def of_row(cls, columns: Mapping[str, Array]) -> "Trajectory":
        """Reads the columns of `ROW`, and `experts` where it is one of them."""
        prompt, response, logprobs, versions, spans, transcript = (columns[name] for name in ROW)
        messages = tuple(json.loads(bytes(transcript)))
        return cls(prompt, response, logprobs, versions, spans, messages, columns.get(EXPERTS))

    @property
    def tokens(self) -> Ids:
        """Returns the tokens of the newest context."""
        return self.context_of(self.turns, given=True)

    @property
    def turns(self) -> int:
        return len(self.spans) // 2

    @property
    def given(self) -> int:
        return int(np.abs(self.spans[1::2]).sum())

    @property
    def unanswered(self) -> tuple[Message, ...]:
        """Returns the messages after the newest one of the policy."""
        own = [place for place, message in enumerate(self.transcript) if message["role"] == POLICY]
        return self.transcript[own[-1] + 1 :]

    def conversation(
        self, opening: list[Message], answered: Callable[[Ids, Ids], Message], quoted: Quote
    ) -> tuple[list[Message], list[Message]]:
        """Returns what `conversations` does. answered: makes a message of a context and what was sampled in it."""
        contexts = [self.context_of(turn)[: -int(self.spans[2 * turn - 2])] for turn in range(1, self.turns + 1)]
        answers = [answered(context, self.answer_of(turn)) for turn, context in enumerate(contexts, 1)]
        return conversations(self.transcript, opening, answers, quoted)

    def tools(self, opening: Tools) -> Tools:
        """Returns the schemas of the tools of the newest context. opening: those of the first one."""
        begun = [message for message in self.transcript if message["role"] == CONTEXT]
        return tuple(begun[-1]["tools"]) if begun else opening

    def answer_of(self, turn: int) -> Ids:
        """Returns the sampled tokens of a turn, from 1."""
        first = int(np.abs(self.spans[: 2 * turn - 2]).sum())
        return self.response[first : first + int(self.spans[2 * turn - 2])]

    def context_of(self, turn: int, *, given: bool = False) -> Ids:
        """Returns the tokens of the context of a turn up to the end of its answer. given: and of what was given after
        it, which may be a context of its own."""
        if turn == 0:
            return self.prompt
        spans = self.spans[: 2 * turn - (0 if given else 1)]
        end = int(np.abs(spans).sum())
        begun = np.flatnonzero(spans < 0)
        if not len(begun):
            return np.concatenate([self.prompt, self.response[:end]])
        return self.response[int(np.abs(spans[: begun[-1]]).sum()) : end]

    def with_given(self, tokens: Ids, *, context: bool = False) -> "Trajectory":
        """Adds what the environment said after the newest turn. context: the tokens begin a new one."""
        spans = self.spans.copy()
        spans[-1] = -len(tokens) if context else len(tokens)
        return replace(self, response=np.concatenate([self.response, tokens]), spans=spans)

    def with_answer(self, completion: Completion, unfinished: str = "") -> "Trajectory":
        """Adds a turn that was sampled. unfinished: CUT or LATE, if that ended it."""
        ended = {FINISH: unfinished} if unfinished else {}
        return Trajectory(
            self.prompt,
            np.concatenate([self.response, completion.tokens]),
            np.concatenate([self.logprobs, completion.logprobs]),
            np.concatenate([self.versions, completion.versions]),
            np.concatenate([self.spans, np.array([len(completion.tokens), 0], np.int32)]),
            (*self.transcript, policy_message(completion.text, completion.request.opened) | ended),
            self._experts_with(completion),
        )

    def _experts_with(self, completion: Completion) -> Array | None:
        """Returns the experts of all tokens. What was recorded in earlier turns stays, though the engine may have
        computed it again."""
        new = completion.experts
        if new is None:
            return None
        begins = len(self.prompt) + len(self.response) - len(completion.request.prompt)
        found = np.full((begins + len(new), new.shape[1]), np.iinfo(new.dtype).max, new.dtype)
        found[begins:] = new
        if self.experts is not None:
            before = self.experts.reshape(-1, new.shape[1])
            known = np.flatnonzero(before[:, 0] != np.iinfo(new.dtype).max)
            found[known] = before[known]
        return found.reshape(-1)

    def columns(self) -> dict[str, Array]:
        """Returns the columns of `ROW`, `text`: the newest answer, and `experts` where they are recorded."""
        arrays = (self.prompt, self.response, self.logprobs, self.versions, self.spans)
        transcript = json.dumps(self.transcript, ensure_ascii=False)
        text = str(self.transcript[-1]["content"])
        encoded = (np.frombuffer(each.encode(), np.uint8) for each in (transcript, text))
        found: dict[str, Array] = dict(zip((*ROW, "text"), (*arrays, *encoded), strict=True))
        return found if self.experts is None else found | {EXPERTS: self.experts}


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn to sample. before: what its answer is added to, None where each sample is one answer."""

    request: SampleRequest
    before: Trajectory | None = None


@dataclass(frozen=True, slots=True)
class TurnRequests:
    """Makes requests. renderer: None where each sample is one answer. budget: of a row. max_turns: of a sample.
    by_template: the chat template may rewrite what the policy saw, which begins a new context."""

    tokenizer: TokenizerWithStops
    renderer: TurnRenderer | None
    budget: TokenBudget
    max_turns: int = 1
    by_template: bool = False

    def first(self, prompts: PromptGroup) -> list[Turn]:
        """Returns the first turn of each member. Raises TaskError for a prompt that cannot be rendered or has no
        room."""
        pictures = None
        if self.renderer is None:
            ids, pictures = self.tokenizer.prompt_and_pictures(prompts.prompt, prompts.tools)
        else:
            ids = self.renderer.prompt_ids(prompts.prompt, prompts.tools)
        if mistake := self.budget.mistake(len(ids)):
            raise TaskError(mistake)
        before = None if self.renderer is None else Trajectory.begin(ids)
        opened = self.tokenizer.opens_thoughts(ids, prompts.prompt)
        requests = [self._request(prompts, member, ids, opened, before, pictures) for member in prompts.members]
        return [Turn(request, before) for request in requests]

    def later(self, prompts: PromptGroup, continued: list[RowRef], rows: Batch) -> tuple[list[Turn], list[RowRef]]:
        """Returns the next turn of each of these samples, and those that have no room for one, as they were but for
        their finish reason. rows: the columns that `Trajectory.of_row` reads. Raises TaskError where what an
        environment said cannot be rendered."""
        assert self.renderer is not None, "samples go on in experiments with an environment only"
        turns = []
        ended = []
        for number, sample in enumerate(continued):
            before = Trajectory.of_row({name: rows[name][number] for name in rows.columns})
            try:
                after = self._answered(prompts, before, self.renderer)
            except TaskError as error:
                raise TaskError(f"group {prompts.id}, member {sample.member}, turn {before.turns}: {error}") from None
            if len(after.response) < self.budget.answer:
                ids = after.tokens
                opened = self.tokenizer.opens_thoughts(ids)
                turns.append(Turn(self._request(prompts, sample.member, ids, opened, after), after))
            else:
                ended.append(sample._replace(finish=NO_ROOM))
        return turns, ended

    def _answered(self, prompts: PromptGroup, before: Trajectory, renderer: TurnRenderer) -> Trajectory:
        """Returns the turns with the tokens of what the environment said last."""
        said = before.unanswered
        tools = before.tools(prompts.tools)
        context = begun_context(said)
        messages, follows = (said, before.turns) if context is None else (context["messages"], context["follows"])
        if self.by_template and (written := self._as_written(prompts, before, renderer, tools)) is not None:
            return before.with_given(written, context=True)
        if not follows:
            return before.with_given(renderer.context_ids(messages, tools), context=True)
        chat = not isinstance(prompts.prompt, str) or not begins_with_prompt(before.transcript, follows)
        added = renderer.given_ids(before.answer_of(follows), messages, chat=chat, tools=tools)
        if context is None:
            return before.with_given(added)
        return before.with_given(np.concatenate([before.context_of(follows), added]), context=True)

    @staticmethod
    def _as_written(prompts: PromptGroup, before: Trajectory, renderer: TurnRenderer, tools: Tools) -> Ids | None:
        """Returns the conversation as the template writes it, where that is a chat and not what the policy saw."""
        opening = [] if isinstance(prompts.prompt, str) else renderer.quoted_opening(prompts.prompt)
        seen, now = before.conversation(opening, renderer.answer_message, renderer.quoted)
        if not now:
            return None
        return renderer.context_as_written(seen, before.answer_of(before.turns), before.unanswered, now, tools)

    def _request(
        self,
        prompts: PromptGroup,
        member: int,
        ids: Ids,
        opened: bool,
        before: Trajectory | None,
        pictures: PromptPictures | None = None,
    ) -> SampleRequest:
        """Returns a request that starts with no older weights than those that sampled the turn before."""
        versions: list[int] = before.versions[-1:].tolist() if before else []
        used, drawn, turns = (len(before.response), len(before.versions), before.turns) if before else (0, 0, 0)
        return SampleRequest(
            (prompts.id, member, prompts.attempt),
            ids,
            member_seed(prompts.seed, member),
            prompts.temperature,
            min(prompts.max_new_tokens, self.budget.answer - used),
            max([prompts.not_before, *versions]),
            prompts.deadline,
            drawn,
            may_go_on=turns + 1 < self.max_turns,
            pictures=pictures,
            opened=opened,
        )
