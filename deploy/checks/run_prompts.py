"""Reads and checks the prompts of a run, before and after its model is known: counts their tokens, and finds characters
that the model never sees."""

import asyncio
import json
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from asyncrl.config.problems import refuse
from asyncrl.config.schema import IN_MEMORY, Config
from asyncrl.controller.training_run import Questions
from asyncrl.deploy.checks.machine import Check
from asyncrl.deploy.checks.model_checks import beyond_embedding, here, may_end_texts
from asyncrl.engines.generation.tokenization import NO_TEMPLATE, TokenizerWithStops, with_clock
from asyncrl.engines.models.model_folder import chat_template_of, context_of_folder, has_chat_template, is_complete
from asyncrl.engines.models.model_preparation import demonstrations_of, sees_pictures
from asyncrl.engines.models.prompt_pictures import PatchCounter
from asyncrl.engines.models.warmed_model_cache import CONTEXT, MERGE, MOST_PIXELS, PATCH
from asyncrl.errors import ConfigError, TaskError
from asyncrl.tasks import Draw, held_out_prompts, training_prompts
from asyncrl.tasks.chat_messages import Messages, ends_with_answer
from asyncrl.tasks.pictures import has_pictures, is_picture, picture_files, with_pictures_read
from asyncrl.tasks.prompt_lengths import (
    LOOKED_AT,
    TokenBudget,
    fitting,
    longest_rows,
    refuse_what_has_no_room,
    write_longest,
)
from asyncrl.tasks.prompt_rows import PromptRows
from asyncrl.tasks.prompt_sources import CURRICULUM, CurriculumDraw, function_named
from asyncrl.tasks.reward_trial import try_rewards
from asyncrl.tasks.row_files import Rows
from asyncrl.tasks.source_problems import check_rows, is_read_ahead
from asyncrl.tasks.turn_template import turn_problems

ANSWER = "answer"
SHOWN = 20
"""Characters that a line names."""


def lost_characters(model: Path, sources: Mapping[str, PromptRows]) -> Iterator[str]:
    """Yields a line for each source with characters that are lost when the tokenizer of a model folder encodes and
    decodes them. sources: by config key. Of a large one, LOOKED_AT rows that are evenly spread are looked at."""
    file = model / "tokenizer.json"
    if not file.is_file() or _takes_bytes(described := file.read_text(encoding="utf-8")):
        return
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(described)
    for key, prompts in sources.items():
        first = _first_rows(prompts)
        lost = [character for character in sorted(first) if not _is_kept(tokenizer, character)]
        if lost:
            named = ", ".join(json.dumps(each, ensure_ascii=False) for each in lost[:SHOWN])
            more = f" and {len(lost) - SHOWN} others" if len(lost) > SHOWN else ""
            yield (
                f"{key}: the tokenizer of the model has no token for {named}{more}, and the model reads texts without "
                f"them, first in {prompts.where(min(first[each] for each in lost))}: write the texts with other "
                "characters, or take another model"
            )


def _takes_bytes(described: str) -> bool:
    """Returns whether a tokenizer makes tokens of bytes where it knows no character."""
    found = json.loads(described)
    return bool((found.get("model") or {}).get("byte_fallback")) or '"ByteLevel"' in json.dumps(
        [found.get("pre_tokenizer"), found.get("decoder")]
    )


def _first_rows(prompts: PromptRows) -> dict[str, int]:
    """Returns the characters of prompts and answers, each with the number of a row that has it."""
    number = min(len(prompts), LOOKED_AT)
    found = dict[str, int]()
    for place in range(number):
        row = place * len(prompts) // number
        prompt, columns = prompts.row(row)
        answer = columns.get(ANSWER)
        for character in {*_text(prompt), *(answer if isinstance(answer, str) else "")}:
            found.setdefault(character, row)
    return found


def _text(prompt: Messages) -> str:
    return prompt if isinstance(prompt, str) else "".join(str(message["content"]) for message in prompt)


def _is_kept(tokenizer: Any, character: str) -> bool:
    """Returns whether a character is there after encoding and decoding; another form of it counts, and so does the
    small letter of a capital one."""
    ids = tokenizer.encode(f"a{character}a", add_special_tokens=False).ids
    decoded = unicodedata.normalize("NFKD", tokenizer.decode(ids, skip_special_tokens=True)).casefold()
    return set(unicodedata.normalize("NFKD", character).casefold()) <= set(decoded)


# Prompts as they are read, and as the model gets them.


TRAINING = "task.prompts"
RAW = (
    "the prompts are texts and the model has a chat template: they are given to it as they are; task.text_prompts = "
    '"chat" makes each a message of the user, "raw" removes this line'
)
PREFILL = (
    "the prompt ends with a message of the assistant, which the model continues: where that is the wanted answer, call "
    'the column "messages" and write task.columns = { prompt = "messages" }, and all before it is asked'
)
EXAMINED_ROWS = 1000
"""Rows whose kind of prompt is looked at before workers start; they look at others."""

SEARCHED = 100_000
"""Rows that are searched for tokens beyond the embedding, which few models have."""

NO_ROLES = (
    "a model of warmed: knows no roles of a chat: task.system stands before each prompt like a part of it, with a "
    "space behind it"
)


@dataclass(frozen=True, slots=True)
class PromptSets:
    """The training prompts of a run, and those of each held-out set, by name."""

    training: PromptRows
    held_out: Mapping[str, PromptRows]

    def by_key(self, config: Config) -> dict[str, PromptRows]:
        """Returns all prompts by the key that names their source."""
        sets = {f"{config.evaluate.set_named(name).section}.prompts": each for name, each in self.held_out.items()}
        return {TRAINING: self.training, **sets}


def read_prompts(config: Config, given: Rows | None = None) -> PromptSets:
    """Reads all prompts; raises TaskError for mistakes in them. given: rows from Python instead of `task.prompts`.
    A policy that acts has one row, which names its environment."""
    given = [{"prompt": config.acting.env}] if config.acting.env else given
    found = {each.name: held_out_prompts(config, name=each.name) for each in config.evaluate.held_out}
    held_out = {name: prompts for name, prompts in found.items() if prompts is not None}
    sets = PromptSets(training_prompts(config, given), held_out)
    check_rows(config, sets.by_key(config))
    return sets


def with_steps_of_epochs(config: Config, given: Rows | None = None) -> Config:
    """Returns the config with the steps of `task.epochs`, if it has a value. given: as in `read_prompts`."""
    task = config.task
    if task.epochs is None:
        return config
    steps = -(-task.epochs * len(training_prompts(config, given)) // task.prompts_per_step)
    return config.model_copy(update={"steps": steps})


def questions_of(
    config: Config, sets: PromptSets, model: Path, longest: Path, places: Mapping[str, str], say: Callable[[str], None]
) -> Questions:
    """Returns the prompts as the model gets them, and writes the longest ones to `longest`. places: where the values of
    keys come from. say: gets a line about each thing that the user may not expect."""
    refuse_unreadable(config, sets.by_key(config), model)
    refuse(turn_problems(config, lambda: prompt_tokenizer(config, model).render_chat, sets.training))
    if config.task.long_prompts != "error":
        sets = _fitting(config, sets, model)
    for note in (note for each in sets.by_key(config).values() for note in each.notes):
        say(note)
    for note in (*shared_prompts(config, sets.training, sets.held_out), *lost_characters(model, sets.by_key(config))):
        say(f"warning: {note}")
    if config.task.system and config.model.name.startswith("warmed:"):
        say(NO_ROLES)
    if _is_raw_by_default(config, places) and isinstance(sets.training.row(0).prompt, str) and chat_template_of(model):
        say(RAW)
    if begun := _first_begun(sets.by_key(config)):
        say(f"{begun}: {PREFILL}")
    write_longest(longest, sets.by_key(config))
    sizes = {name: min(config.evaluate.set_named(name).size, len(prompts)) for name, prompts in sets.held_out.items()}
    held_out = {name: [sets.held_out[name].row(number) for number in range(size)] for name, size in sizes.items()}
    return Questions(draw_of(config, sets.training), held_out)


def refuse_unreadable(config: Config, sets: Mapping[str, PromptRows], model: Path) -> None:
    """Raises TaskError for the first prompt that the model cannot take. model: its folder, which is there."""
    if not has_chat_template(model):
        _refuse_messages(sets)
    refuse_marks(config, sets, model)


def _refuse_messages(sets: Mapping[str, PromptRows]) -> None:
    """Raises TaskError for the first prompt of messages, which a model without a chat template cannot take."""
    for key, prompts in sets.items():
        for number in range(min(len(prompts), EXAMINED_ROWS)):
            if not isinstance(prompts.row(number).prompt, str):
                raise TaskError(f"{key}: {prompts.where(number)}: {NO_TEMPLATE}")


def refuse_marks(config: Config, sets: Mapping[str, PromptRows], model: Path) -> None:
    """Raises TaskError for the first row with a token that the model has no row of its embedding for, and for a text
    behind which the tokenizer writes an end."""
    beyond = beyond_embedding(model)
    ends = may_end_texts(model)
    tokenizer = prompt_tokenizer(config, model) if ends else None
    for key, prompts in sets.items():
        for number in range(min(len(prompts), SEARCHED if beyond else EXAMINED_ROWS if ends else 0)):
            prompt = prompts.row(number).prompt
            if token := next((text for text in beyond if text in str(prompt)), None):
                raise TaskError(
                    f"{key}: {prompts.where(number)} holds {token} (id {beyond[token]}), for which the embedding in "
                    f"{model} has no row: take the token out, or call model.resize_token_embeddings and save the model"
                )
            if tokenizer is not None and isinstance(prompt, str):
                try:
                    tokenizer.prompt_ids(prompt)
                except TaskError as error:
                    raise TaskError(f"{key}: {prompts.where(number)}: {error}") from error


def draw_of(config: Config, prompts: PromptRows, model: Path | None = None) -> Draw:
    """Returns what gives each group its row. model: folder of the model, where `prompts` are those that were read."""
    task = config.task
    if model is not None and task.long_prompts != "error":
        prompts = _fitting(config, PromptSets(prompts, {}), model).training
    if not task.curriculum:
        return Draw(prompts, config.seed, task.shuffle)
    weights = function_named(task.curriculum, CURRICULUM)
    draw = CurriculumDraw(prompts, config.seed, task.shuffle, weights, task.prompts_per_step)
    draw.number(0)  # Mistakes of the function are found before workers start, if it makes them at once.
    return draw


def _first_begun(sets: Mapping[str, PromptRows]) -> str:
    """Returns where the first prompt is that ends with the beginning of an answer; "" where there is none."""
    for key, prompts in sets.items():
        for number in range(min(len(prompts), EXAMINED_ROWS)):
            if ends_with_answer(prompts.row(number).prompt):
                return f"{key}: {prompts.where(number)}"
    return ""


def _is_raw_by_default(config: Config, places: Mapping[str, str]) -> bool:
    """Returns whether nobody has said what becomes of prompts that are text, which no environment replaces. Models that
    are made on the spot have learnt such prompts."""
    if config.model.name.startswith("warmed:"):
        return False
    return config.task.text_prompts == "raw" and "task.text_prompts" not in places and not config.environment.use


def _fitting(config: Config, sets: PromptSets, model: Path) -> PromptSets:
    """Returns prompts that have room before their answers."""
    limit = config.task.max_prompt_tokens
    context = context_of_folder(model)
    limit = limit if context is None else min(limit, context - config.response_tokens)
    tokenizer = prompt_tokenizer(config, model)
    shorten = config.task.long_prompts == "truncate"

    def count(prompt: Messages, tools: Sequence[dict[str, Any]]) -> int:
        return len(tokenizer.prompt_ids(prompt, tools))

    def fit(prompts: PromptRows) -> PromptRows:
        return fitting(prompts, count, limit, shorten=shorten, mark=tokenizer.special_in)

    return PromptSets(fit(sets.training), {name: fit(prompts) for name, prompts in sets.held_out.items()})


def prompt_tokenizer(config: Config, model: Path) -> TokenizerWithStops:
    """Returns what makes tokens of prompts as generation does."""
    from transformers import AutoTokenizer  # not at the top: importing it takes seconds, and few runs count tokens here

    return TokenizerWithStops(AutoTokenizer.from_pretrained(model), (), config.task.template_arguments)


def shared_prompts(config: Config, training: PromptRows, held_out: Mapping[str, PromptRows]) -> list[str]:
    """Returns a line for each held-out set that shares prompts with training. Of a large source, LOOKED_AT rows that
    are evenly spread are compared."""
    if config.environment.use or not held_out:  # An environment makes the prompts that count.
        return []
    number = min(len(training), LOOKED_AT)
    trained = {_compared_text(training.row(place * len(training) // number).prompt) for place in range(number)}
    found = []
    for name, prompts in held_out.items():
        chosen = config.evaluate.set_named(name)
        asked = range(min(chosen.size, len(prompts)))
        shared = [row for row in asked if _compared_text(prompts.row(row).prompt) in trained]
        if shared:
            found.append(
                f"{chosen.section}.prompts: {len(shared)} of {len(asked)} prompts are trained on too, such as that of "
                f"{prompts.where(shared[0])}; docs/prompts.md shows how to hold rows out"
            )
    return found


def _compared_text(prompt: Messages) -> str:
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, default=str)


# Counts the tokens of an experiment's prompts before a run, where that needs no code of the user and no download.


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
        return lambda prompt: len(pattern.findall(_rendered(prompt, None, arguments)))
    from tokenizers import Tokenizer

    folder = Path(model).expanduser()
    tokenizer = Tokenizer.from_str((folder / "tokenizer.json").read_text(encoding="utf-8"))
    template = chat_template_of(folder)
    return lambda prompt: len(tokenizer.encode(_rendered(prompt, template, arguments)).ids)


def _rendered(prompt: Messages, template: str | None, arguments: Mapping[str, Any]) -> str:
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


# Says for `asyncrl doctor` what the sources of prompts have, rows and columns, and tries the rewards on them.


def prompt_checks(config: Config, *, counts: bool = True) -> Iterator[Check]:
    """Reads small files and folders of rows; sources that take code, a download or long are only named. counts: whether
    tokens of prompts are counted, for which the model has to be in order."""
    model = here(config.model)
    refuse_prompts = refuse_unreadable if is_complete(model) else refuse_marks

    def refuse(sets: Mapping[str, PromptRows]) -> list[str]:
        refuse_prompts(config, sets, model)
        if counts:
            refuse_long_prompts(config, sets, model)
        return asyncio.run(try_rewards(config, sets))

    sources = [each.use for each in config.task.sources]
    yield from _source_checks("task.prompts", sources, partial(training_prompts, config), refuse)
    for each in config.evaluate.held_out:
        read = partial(held_out_prompts, config, name=each.name)
        yield from _source_checks(f"{each.section}.prompts", [each.prompts], read, refuse)


def _source_checks(
    key: str,
    specs: Sequence[str],
    read: Callable[[], PromptRows | None],
    refuse: Callable[[Mapping[str, PromptRows]], list[str]],
) -> Iterator[Check]:
    unread = [spec for spec in specs if spec != IN_MEMORY and not is_read_ahead(spec)]
    if unread:
        remedy = f"nothing here has looked at its rows: `asyncrl try` reads them, and so does the run ({key})"
        yield Check("prompts", "note", f"{', '.join(unread)} is not read yet", remedy)
        return
    try:
        prompts = read()
        if prompts is None:
            return
        yield Check("prompts", "ok", f"{prompts.source}: {len(prompts)} rows, columns {_columns(prompts)}")
        for note in prompts.notes:
            yield Check("prompts", "ok", note)
    except (TaskError, ConfigError):
        return  # The checks before this one say what is wrong with the source.
    try:
        for note in refuse({key: prompts}):
            yield Check("rewards", "note", note)
    except ConfigError:
        return  # Those of the config have said it.
    except TaskError as error:
        yield Check("prompts", "bad", str(error))


def _columns(prompts: PromptRows) -> str:
    return ", ".join(prompts.row(0).columns)
