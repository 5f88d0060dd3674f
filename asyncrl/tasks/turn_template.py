"""Finds out what a chat template makes of the turns of an episode, as text, and what it cannot show.

The text that follows an answer is the difference of two renderings of a stand-in for the conversation. So it does not
matter what a template would make of earlier answers, such as dropping their thoughts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from typing import Any

from asyncrl.config.problems import Problem
from asyncrl.config.schema import Config
from asyncrl.environments.loading import answer_role
from asyncrl.environments.observation import Message
from asyncrl.environments.transcript import POLICY
from asyncrl.errors import ConfigError, TaskError
from asyncrl.protocols.answer_text import PAIRS, ends_in_thoughts, split_thoughts
from asyncrl.tasks.prompt_rows import PromptRows
from asyncrl.tasks.prompt_sources import training_prompts
from asyncrl.tasks.source_problems import is_read_ahead

Tools = tuple[dict[str, Any], ...]
Render = Callable[[Sequence[Message], Tools, Mapping[str, bool]], str]
"""Renders messages with tools up to one of the ends below. Raises TaskError where the template fails."""

BEFORE_ANSWER = {"add_generation_prompt": True}
WHOLE = {"add_generation_prompt": False}
INSIDE_ANSWER = {"add_generation_prompt": False, "continue_final_message": True}
"""Ends of a rendered chat: the mark for the start of an answer, nothing, or the answer in the last message, open."""

ASKED: Message = {"role": "user", "content": "asked"}
ANSWERS = ("answered", "<think>\nthought\n</think>\n\nanswered")
MARK = "answer7f3a"  # stands for an answer, in a rendering that is cut behind it
CHECKED_TURNS = 3
ROLES = ("user", "tool")
"""Roles in which environments answer."""
FIELDS = ("reasoning_content", "thinking")
"""Fields of a message in which templates look for thoughts."""


class TurnTemplate:
    """Asks a template about conversations by rendering them."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._problem = cache(self._find_problem)

    def refuse_role(self, role: str) -> None:
        """Raises TaskError when an environment cannot answer in this role; "": in none."""
        problems = [self._problem(each) for each in ([role] if role else ROLES)]
        if all(problems):
            raise TaskError("; ".join(dict.fromkeys(filter(None, problems))))

    def refuse_unseen(self, messages: Sequence[Message]) -> None:
        """Raises TaskError for messages in a role that the template does not show, or not as it shows others."""
        for role in dict.fromkeys(str(message["role"]) for message in messages):
            self.refuse_role(role)

    def conversation(self, messages: Sequence[Message], tools: Tools) -> str:
        """Returns a conversation up to the next answer."""
        return self._render(messages, tools, INSIDE_ANSWER if messages[-1]["role"] == POLICY else BEFORE_ANSWER)

    def suffix(self, messages: Sequence[Message], tools: Tools = (), before: Sequence[Message] = (ASKED,)) -> str:
        """Returns what the template writes after an answer that these messages follow. before: what precedes it."""
        conversation = [*before, {"role": POLICY, "content": MARK}, *messages]
        _, found, suffix = self._render(conversation, tools, BEFORE_ANSWER).rpartition(MARK)
        if not found:
            raise TaskError("the model's chat template shows no earlier answers of the assistant")
        return suffix

    @cached_property
    def end(self) -> str:
        """Returns what the template writes behind an answer that is the last message; "" where it takes none."""
        try:
            return self._render([ASKED, {"role": POLICY, "content": MARK}], (), WHOLE).partition(MARK)[2]
        except TaskError:
            return ""

    def answer(self, before: str, text: str) -> Message:
        """Returns the message that a template is shown for an answer: its thoughts are in `content`, or in fields of
        their own where the template reads those alone. before: the end of what the policy saw, in which the template
        may have opened the thoughts."""
        if ends_in_thoughts(before):
            text = before[max(before.rfind(begin) for begin, _ in PAIRS) :] + text
        if not self._reads_fields:
            return {"role": POLICY, "content": text}
        thoughts, content = split_thoughts(text)
        for mark in (mark for pair in PAIRS for mark in pair):
            thoughts = thoughts.replace(mark, "")
        return {"role": POLICY, "content": content.strip("\n")} | dict.fromkeys(FIELDS, thoughts.strip("\n"))

    @cached_property
    def _reads_fields(self) -> bool:
        """Returns whether thoughts are only known to the template in fields beside `content`."""
        inside = {"role": POLICY, "content": f"<think>\n{MARK}\n</think>\n\nanswered"}
        beside = {"role": POLICY, "content": "answered"} | dict.fromkeys(FIELDS, MARK)
        return self._shows_mark([ASKED, inside, ASKED], fails=True) and self._shows_mark([ASKED, beside], fails=False)

    def _shows_mark(self, messages: Sequence[Message], *, fails: bool) -> bool:
        try:
            return MARK in self._render(messages, (), WHOLE)
        except TaskError:
            return fails

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
            "template that writes messages of this role, or let the environment begin with a prompt that is text, to "
            "which its answers are added as they are"
        )

    def _problems(self, role: str) -> Iterator[str]:
        """Compares what the template writes after answers of several turns."""
        # Tools may answer side by side.
        said = [{"role": role, "content": f"said{each}"} for each in range(1 + (role == "tool"))]
        alone = self.suffix(said)
        if missing := [each for each in said if each["content"] not in alone]:
            yield f"the model's chat template leaves out messages of the role {missing[0]['role']!r}"
        for answer in ANSWERS:
            for turns in range(1, CHECKED_TURNS):
                before = [ASKED, *([{"role": POLICY, "content": answer}, *said] * turns)]
                if self.suffix(said, (), before) != alone:
                    yield "what the model's chat template writes for such a message depends on earlier turns"


def turn_problems(config: Config, render: Callable[[], Render], prompts: PromptRows | None = None) -> Iterator[Problem]:
    """Yields why an environment cannot answer conversations that begin with the prompts, as far as the template tells.
    prompts: None: they are read where that runs no code of the user."""
    if not config.environment.use or not (prompts or all(is_read_ahead(each.use) for each in config.task.sources)):
        return
    try:
        if isinstance((prompts or training_prompts(config)).row(0).prompt, str):
            return
    except (TaskError, ConfigError):
        return  # Other checks say what is wrong with the prompts.
    try:
        TurnTemplate(render()).refuse_role(answer_role(config.environment))
    except TaskError as error:
        yield Problem.of_error(error, "environment.use")
