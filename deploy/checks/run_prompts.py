"""Reads and checks the prompts of a run, before and after its model is known."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.config.problems import refuse
from asyncrl.config.schema import Config
from asyncrl.controller.training_run import Questions
from asyncrl.deploy.checks.folder_contents import beyond_embedding, may_end_texts
from asyncrl.deploy.checks.lost_characters import lost_characters
from asyncrl.engines.generation.tokenization import NO_TEMPLATE, TokenizerWithStops
from asyncrl.engines.models.model_folder import chat_template_of, context_of_folder, has_chat_template
from asyncrl.errors import TaskError
from asyncrl.tasks import Draw, held_out_prompts, training_prompts
from asyncrl.tasks.chat_messages import Messages, ends_with_answer
from asyncrl.tasks.curriculum import KEY as CURRICULUM
from asyncrl.tasks.curriculum import CurriculumDraw
from asyncrl.tasks.prompt_lengths import LOOKED_AT as COMPARED
from asyncrl.tasks.prompt_lengths import fitting, write_longest
from asyncrl.tasks.prompt_rows import PromptRows
from asyncrl.tasks.prompt_sources import function_named
from asyncrl.tasks.reading.row_files import Rows
from asyncrl.tasks.source_problems import check_rows
from asyncrl.tasks.turn_template import turn_problems

TRAINING = "task.prompts"
RAW = (
    "the prompts are texts and the model has a chat template: they are given to it as they are; task.text_prompts = "
    '"chat" makes each a message of the user, "raw" removes this line'
)
PREFILL = (
    "the prompt ends with a message of the assistant, which the model continues: where that is the wanted answer, call "
    'the column "messages" and write task.columns = { prompt = "messages" }, and all before it is asked'
)
LOOKED_AT = 1000
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
        for number in range(min(len(prompts), LOOKED_AT)):
            if not isinstance(prompts.row(number).prompt, str):
                raise TaskError(f"{key}: {prompts.where(number)}: {NO_TEMPLATE}")


def refuse_marks(config: Config, sets: Mapping[str, PromptRows], model: Path) -> None:
    """Raises TaskError for the first row with a token that the model has no row of its embedding for, and for a text
    behind which the tokenizer writes an end."""
    beyond = beyond_embedding(model)
    ends = may_end_texts(model)
    tokenizer = prompt_tokenizer(config, model) if ends else None
    for key, prompts in sets.items():
        for number in range(min(len(prompts), SEARCHED if beyond else LOOKED_AT if ends else 0)):
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
        for number in range(min(len(prompts), LOOKED_AT)):
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
    """Returns a line for each held-out set that shares prompts with training. Of a large source, COMPARED rows that
    are evenly spread are compared."""
    if config.environment.use or not held_out:  # An environment makes the prompts that count.
        return []
    number = min(len(training), COMPARED)
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
