"""Counts the tokens of an experiment's prompts before a run, where that needs no code of the user and no download."""

import re
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from asyncrl.config.schema import Config
from asyncrl.deploy.checks.run_prompts import prompt_tokenizer
from asyncrl.engines.models.model_folder import chat_template_of, context_of_folder, is_complete
from asyncrl.engines.models.model_preparation import demonstrations_of, sees_pictures
from asyncrl.engines.models.text_marks import with_clock
from asyncrl.engines.models.warmed_model_cache import CONTEXT, MERGE, MOST_PIXELS, PATCH
from asyncrl.engines.pictures.processing import PatchCounter
from asyncrl.errors import ConfigError, TaskError
from asyncrl.tasks import held_out_prompts, training_prompts
from asyncrl.tasks.chat_messages import Messages
from asyncrl.tasks.prompt_lengths import TokenBudget, longest_rows, refuse_what_has_no_room, write_longest
from asyncrl.tasks.prompt_rows import PromptRows
from asyncrl.tasks.reading.pictures import has_pictures, is_picture, picture_files, with_pictures_read
from asyncrl.tasks.source_problems import is_read_ahead

SPREAD = 256
"""Rows of a source, evenly spread, whose tokens are counted for the mean."""
PICTURE = "\0\0\0"
"""Three tokens: the begin of a picture, the picture, and its end."""
BUILTIN = "asyncrl.tasks.builtin."
Count = Callable[[Messages], int]
Seen = Callable[[Messages], tuple[int, int]]
"""Counts the tokens of a prompt, those of pictures among them, and the patches of its pictures."""


@dataclass(frozen=True, slots=True)
class RowLengths:
    """Tokens of prompts: the mean, and the longest. rows: how many were counted; 0: the config's bound stands for
    both. patches: of the pictures of a prompt in the mean, where rows were counted; else its tokens bound them."""

    mean: int
    longest: int
    rows: int = 0
    patches: int = 0

    @classmethod
    def allowed(cls, config: Config) -> Self:
        """Returns the most that the config allows."""
        return cls(config.task.max_prompt_tokens, config.task.max_prompt_tokens)

    def __str__(self) -> str:
        if not self.rows:
            return f"unknown before the prompts are read: each is taken for {self.longest} (task.max_prompt_tokens)"
        return f"{self.mean} in the mean and at most {self.longest}, by {self.rows} rows"


def measured_lengths(config: Config, model: str) -> RowLengths:
    """Counts tokens of training and held-out prompts; returns what the config allows where that is not possible."""
    allowed = RowLengths.allowed(config)
    specs = [*(each.use for each in config.task.sources), *(each.prompts for each in config.evaluate.held_out)]
    if config.environment.use or not all(spec.startswith(BUILTIN) or is_read_ahead(spec) for spec in specs):
        return allowed  # Environments make prompts too.
    try:
        count = _with_pictures(_counter(model, config.task.template_arguments), model)
        rows = [
            training_prompts(config),
            *(held_out_prompts(config, name=each.name) for each in config.evaluate.held_out),
        ]
        found = [_counted(prompts, count) for prompts in rows if prompts is not None]
    except (TaskError, ConfigError, TemplateError, OSError, ValueError, LookupError, TypeError):
        return allowed  # The checks of prompts and model say what is wrong with them.
    bound = allowed.longest
    counted = sum(each.rows for each in found)
    longest = min(bound, max(each.longest for each in found))
    return RowLengths(min(bound, found[0].mean), longest, counted, found[0].patches)


def refuse_long_prompts(config: Config, sets: Mapping[str, PromptRows], model: Path) -> None:
    """Raises TaskError for the longest prompt that has no room, as generation does when it starts. model: its folder,
    or the path of a name. Tokens are counted where the model is here, or a tiny one that `warmed:` makes."""
    if config.task.long_prompts != "error":
        return  # These are shortened or left out.
    if is_complete(model):
        tokenize: Callable[..., Sized] = prompt_tokenizer(config, model).prompt_ids
        context = context_of_folder(model)
    elif config.model.name.startswith("warmed:") and ":" not in config.model.name[7:]:
        count = _counter(config.model.name, config.task.template_arguments)
        context = CONTEXT
        tokenize = lambda prompt, tools: range(count(prompt))  # noqa: E731
    else:
        return
    with TemporaryDirectory() as folder:
        longest = Path(folder) / "longest.jsonl"
        write_longest(longest, sets)
        room = TokenBudget(config.task.max_prompt_tokens, config.response_tokens, context)
        refuse_what_has_no_room(longest, tokenize, room)


def _counted(prompts: PromptRows, count: Seen) -> RowLengths:
    """Counts tokens of rows that are evenly spread, and of those with the most characters."""
    number = min(len(prompts), SPREAD)
    spread = [count(prompts.row(place * len(prompts) // number).prompt) for place in range(number)]
    longest = [count(prompts.row(row).prompt) for row in longest_rows(prompts)]
    tokens, patches = ([each[part] for each in spread] for part in (0, 1))
    most = max(*tokens, *(each for each, _ in longest))
    return RowLengths(-(-sum(tokens) // number), most, number + len(longest), -(-sum(patches) // number))


def _with_pictures(count: Count, model: str) -> Seen:
    """Returns what counts pictures too, each of which is one token for `count`."""
    warmed = PatchCounter(PATCH, MERGE, (PATCH * MERGE) ** 2, MOST_PIXELS) if sees_pictures(model) else None
    pictures = warmed or PatchCounter.of_folder(Path(model).expanduser())

    def seen(prompt: Messages) -> tuple[int, int]:
        if pictures is None or not has_pictures(prompt):
            return count(prompt), 0
        found = pictures.patches(picture_files(with_pictures_read(prompt)))
        return count(prompt) - len(found) + sum(found) // pictures.merge**2, sum(found)

    return seen


def _counter(model: str, arguments: Mapping[str, Any]) -> Count:
    """Returns what counts the tokens of a prompt for a model that is on this machine or that `warmed:` makes."""
    source, _, task = model.partition(":")
    if source == "warmed" and ":" not in task:  # One token for a word or a character.
        pattern = re.compile("|".join([*map(re.escape, demonstrations_of(task).words), r"[\s\S]"]))
        return lambda prompt: len(pattern.findall(_text(prompt, None, arguments)))
    from tokenizers import Tokenizer

    folder = Path(model).expanduser()
    tokenizer = Tokenizer.from_str((folder / "tokenizer.json").read_text(encoding="utf-8"))
    template = chat_template_of(folder)
    return lambda prompt: len(tokenizer.encode(_text(prompt, template, arguments)).ids)


def _text(prompt: Messages, template: str | None, arguments: Mapping[str, Any]) -> str:
    """Renders a prompt, of messages by the template with its further arguments."""
    if isinstance(prompt, str):
        return prompt
    if template is None:
        return "".join(f"{_content(message)}{' ' if message['role'] == 'system' else ''}" for message in prompt)
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    values: dict[str, Any] = {"messages": prompt, "add_generation_prompt": True, "bos_token": "", **arguments}
    return environment.from_string(with_clock(template)).render(values)


def _content(message: Mapping[str, Any]) -> str:
    """Returns the content of a message for a model that `warmed:` makes."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(PICTURE if is_picture(part) else part["text"] for part in content)
