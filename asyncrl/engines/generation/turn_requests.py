"""Makes the requests of turns: the first one from the prompt of a group, each later one from the row of its sample."""

from dataclasses import dataclass

import numpy as np

from asyncrl.engines.generation.scheduling.sample_requests import SampleRequest
from asyncrl.engines.generation.tokenization import TokenizerWithStops
from asyncrl.engines.generation.trajectory import Ids, Trajectory
from asyncrl.engines.generation.turn_rendering import TurnRenderer
from asyncrl.engines.pictures.prompt_pictures import PromptPictures
from asyncrl.environments.transcript import begins_with_prompt, begun_context
from asyncrl.errors import TaskError
from asyncrl.protocols.batch import NO_ROOM, Batch, RowRef
from asyncrl.protocols.messages import PromptGroup
from asyncrl.protocols.seeds import member_seed
from asyncrl.tasks.prompt_lengths import TokenBudget
from asyncrl.tasks.turn_template import Tools


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
        turns, ended = [], []
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
        said, tools = before.unanswered, before.tools(prompts.tools)
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
