"""Renders the turns of an episode, token in, token out: what was sampled is never tokenized again.

    prompt | sampled, turn 1 | given | sampled, turn 2 | given | ...

Given tokens are what the chat template writes after an answer, up to its next mark for the start of an answer: the end
of the turn, the environment's messages, and that mark. What reads like a special token in these messages stays text. A
prompt that is text has no template, and the environment's text is tokenized as it is, with the special tokens in it.

The template is asked about a stand-in for the conversation, so it has to leave earlier messages as they are. Whether it
does depends on the role of the environment's messages: some templates drop the thoughts of answers before the newest
message of the user, but not before the newest of a tool.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.engines.generation.tokenization import Message, TokenizerWithStops
from asyncrl.environments.transcript import without_info
from asyncrl.errors import TaskError

Ids = NDArray[np.int32]
Tools = tuple[dict[str, Any], ...]

ASKED = {"role": "user", "content": "asked"}
ANSWERS = ("answered", "<think>\nthought\n</think>\n\nanswered")
MARK = "answer7f3a"  # stands for an answer, in a rendering that is cut behind it
CHECKED_TURNS = 3
NOTHING = np.zeros(0, np.int32)


class TurnRenderer:
    """Renders prompts and what an environment answers. ends: ids that end an answer."""

    def __init__(self, tokenizer: TokenizerWithStops, ends: NDArray[np.int64]) -> None:
        self._tokenizer = tokenizer
        self._ends = frozenset(ends.tolist())
        self._problem = cache(self._find_problem)

    def prompt_ids(self, prompt: str | list[Message], tools: Tools = (), role: str = "") -> Ids:
        """Returns the ids of an opening. Raises TaskError when it cannot be rendered, or when it is a chat that no
        environment can answer with this template. role: in which the environment will answer; "": that is not known."""
        if not isinstance(prompt, str):
            roles = [role] if role else ["tool"] if tools else ["user", "tool"]
            problems = [self._problem(role) for role in roles]
            if all(problems):
                raise TaskError("; ".join(dict.fromkeys(filter(None, problems))))
        return self._tokenizer.prompt_ids(prompt, tools, by_environment=True)

    def context_ids(self, messages: Sequence[Message], tools: Tools = ()) -> Ids:
        """Returns the ids of a conversation with which an environment begins a new context. Special tokens in it stay
        text, as in all that an environment says. Raises TaskError when it cannot be rendered as it is."""
        return self._tokenizer.quoted_ids(messages, tools)

    def given_ids(self, answer: Ids, messages: Sequence[Message], *, chat: bool, tools: Tools = ()) -> Ids:
        """Returns the tokens that follow the sampled ones of an answer when an environment says these messages.

        chat: whether the prompt is one. The end of the answer is given only where the answer lacks it. Raises TaskError
        for messages that the template cannot show, or that make it change what came before.
        """
        if not chat:
            return self._tokenizer.text_ids("".join(str(message["content"]) for message in messages))
        for role in dict.fromkeys(str(message["role"]) for message in messages):
            if problem := self._problem(role):
                raise TaskError(problem)
        # The environment may repeat what the policy wrote, which must not become a mark of the template.
        ids = self._tokenizer.rendered_ids(self._suffix(self._tokenizer.quoted(without_info(messages)), tools))
        return ids[1:] if self._ends_with(answer, ids) else ids

    def _ends_with(self, answer: Ids, ids: Ids) -> bool:
        """Returns whether an answer has the end already with which these ids begin, or another one."""
        if not len(answer) or not len(ids):
            return False
        last, first = int(answer[-1]), int(ids[0])
        return (last in self._ends and first in self._ends) or (last == first and self._tokenizer.is_special(last))

    def _suffix(self, messages: Sequence[Message], tools: Tools = ()) -> str:
        """Returns what the template writes after an answer that these messages follow."""
        conversation = [ASKED, {"role": "assistant", "content": MARK}, *messages]
        _, found, suffix = self._tokenizer.render_chat(conversation, tools).partition(MARK)
        if not found:
            raise TaskError("the model's chat template shows no earlier answers of the assistant")
        return suffix

    def _find_problem(self, role: str) -> str | None:
        """Returns why an environment cannot answer in this role, and what to do; None if it can."""
        try:
            problem = next(self._problems(role), None)
        except TaskError as error:
            problem = str(error)
        if problem is None:
            return None
        advice = 'write environment.options.role = "user", ' if role == "tool" else ""
        return (
            f"an environment cannot answer in the role {role!r}: {problem}; {advice}give the model folder a chat "
            "template that writes messages of this role and leaves earlier ones as they are, or let the environment "
            "begin with a prompt that is text, to which its answers are added as they are"
        )

    def _problems(self, role: str) -> Iterator[str]:
        """Compares conversations of one turn and more with what their turns are put together from."""
        for answer in ANSWERS:
            messages: list[Message] = [ASKED]
            expected = self._tokenizer.render_chat(messages)
            for turn in range(CHECKED_TURNS):
                # Tools may answer side by side.
                said = [{"role": role, "content": f"said{turn}{each}"} for each in range(1 + (role == "tool"))]
                messages += [{"role": "assistant", "content": answer}, *said]
                expected += answer + self._suffix(said)
                shown = self._tokenizer.render_chat(messages)
                if missing := [each for each in said if each["content"] not in shown]:
                    yield f"the model's chat template leaves out messages of the role {missing[0]['role']!r}"
                if shown != expected:
                    what = "the thoughts (<think>) of earlier answers" if answer != ANSWERS[0] else "earlier messages"
                    yield f"the model's chat template removes or rewrites {what} when such a message follows"
