"""Renders the turns of an episode, token in, token out: what was sampled is never tokenized again.

    prompt | sampled, turn 1 | given | sampled, turn 2 | given | ...

Given tokens are what the chat template writes after an answer, up to its next mark for the start of an answer: the end
of the turn, the environment's messages, and that mark (tasks/turn_template.py). A prompt that is text has no template,
and the environment's text is tokenized as it is. What reads like a special token in an opening, in messages or in text
stays text. `environment.thoughts = "template"` renders the conversation anew, and where it is not what the policy saw,
a new context begins.
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from asyncrl.engines.generation.tokenization import ASSISTANT, Message, TokenizerWithStops
from asyncrl.environments.transcript import begun_context, without_info
from asyncrl.tasks.turn_template import Tools, TurnTemplate

Ids = NDArray[np.int32]
LONGEST_OPENING = 32  # tokens at the end of a context among which a template opens thoughts


class TurnRenderer:
    """Renders prompts and what an environment answers. ends: ids that end an answer."""

    def __init__(self, tokenizer: TokenizerWithStops, ends: NDArray[np.int64]) -> None:
        self._tokenizer = tokenizer
        self._ends = frozenset(ends.tolist())
        self._template = TurnTemplate(tokenizer.render_chat)

    def prompt_ids(self, prompt: str | list[Message], tools: Tools = (), role: str = "") -> Ids:
        """Returns the ids of an opening. Raises TaskError when it cannot be rendered, or when it is a chat that no
        environment can answer with this template. role: in which the environment will answer; "": that is not known."""
        if not isinstance(prompt, str):
            self._template.refuse_role(role or ("tool" if tools else ""))
        return self._tokenizer.prompt_ids(prompt, tools, by_environment=True)

    def context_ids(self, messages: Sequence[Message], tools: Tools = ()) -> Ids:
        """Returns the ids of a conversation with which an environment begins a new context. Special tokens in it stay
        text, as in all that an environment says. Raises TaskError when it cannot be rendered as it is."""
        return self._tokenizer.quoted_ids(messages, tools)

    def given_ids(self, answer: Ids, messages: Sequence[Message], *, chat: bool, tools: Tools = ()) -> Ids:
        """Returns the tokens that follow the sampled ones of an answer when an environment says these messages.

        chat: whether the prompt is one. The end of the answer is given only where the answer lacks it. Raises TaskError
        for messages that the template cannot show.
        """
        if not chat:
            return self._tokenizer.said_ids("".join(str(message["content"]) for message in messages))
        self._template.refuse_unseen(messages)
        ids = self._tokenizer.rendered_ids(self._template.suffix(self.quoted(messages), tools))
        return ids[self._written(answer, ids) :]

    def context_as_written(
        self, seen: Sequence[Message], answer: Ids, said: Sequence[Message], now: Sequence[Message], tools: Tools
    ) -> Ids | None:
        """Returns the ids of the conversation `now` as the template writes it; None where it leaves what the policy saw
        and sampled as it was, so that `given_ids` of `said` go on there. seen: the conversation before the answer.
        Raises TaskError for messages that the template cannot show."""
        template = self._template
        whole = template.conversation(now, tools)
        if context := begun_context(said):
            self._tokenizer.refuse_changed_parts(self.quoted(context["messages"]), tools, whole, but=ASSISTANT)
            return self._tokenizer.rendered_ids(whole)
        template.refuse_unseen(said)
        kept = template.conversation(seen, tools) + self._text_of(answer) + template.suffix(self.quoted(said), tools)
        return None if whole == kept else self._tokenizer.rendered_ids(whole)

    def answer_message(self, context: Ids, answer: Ids) -> Message:
        """Returns the message that the template is shown for an answer. context: what the policy saw before it."""
        before = self._tokenizer.decode(context[-LONGEST_OPENING:], skip_special_tokens=False)
        return self._template.answer(before, self._text_of(answer))

    def quoted(self, messages: Sequence[Message]) -> list[Message]:
        """Returns messages of an environment, which may repeat what the policy wrote: no part of them becomes a mark of
        the template."""
        return list(self._tokenizer.quoted(without_info(messages)))

    def quoted_opening(self, messages: Sequence[Message]) -> list[Message]:
        """Returns messages with which an episode begins, such as the whole first request of an agent: no part of them
        becomes a mark of the template."""
        return [self._tokenizer.quoted_opening(message) for message in messages]

    @cached_property
    def _end(self) -> list[int]:
        return [int(token) for token in self._tokenizer.rendered_ids(self._template.end)]

    def _text_of(self, answer: Ids) -> str:
        """Returns the text of an answer without the tokens that end it."""
        ends = self._ends.union(filter(self._tokenizer.is_special, self._end))
        while len(answer) and int(answer[-1]) in ends:
            answer = answer[:-1]
        return self._tokenizer.decode(answer, skip_special_tokens=False)

    def _written(self, answer: Ids, ids: Ids) -> int:
        """Returns how many of these ids, with which the template goes on after an answer, the answer ends with, or with
        others in their place."""
        if not len(answer) or not len(ids):
            return 0
        last = int(answer[-1])
        ends = {last, *self._ends} if last in self._ends else {last}
        place = next((place for place, token in enumerate(self._end) if token in ends), None)
        if place is not None:
            same = ids[: place + 1].tolist() == self._end[: place + 1]
            if same or (not place and self._tokenizer.is_special(int(ids[0]))):
                return place + 1
        return int(last == int(ids[0]) and self._tokenizer.is_special(last))
