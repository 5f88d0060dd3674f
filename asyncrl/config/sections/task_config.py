"""The section `[task]`: the prompts to train on, where they come from, and the size of a batch."""

from datetime import date, datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from asyncrl.config.sections.algorithm_config import Positive, Section
from asyncrl.config.sections.secret import Options

IN_MEMORY = "python:rows"
"""The value of `task.prompts` in a run whose prompts were given as Python objects."""


DECIDED = {"messages", "tools", "tokenize", "add_generation_prompt", "continue_final_message", "return_dict"}
"""Arguments of apply_chat_template that asyncrl decides."""


CLOCK = "asyncrl_clock"
"""Argument of chat templates in place of the clock."""
_ALONE = "aAwdbBmyYHIMSfpzZjUWVcxXGueDFT"
DIRECTIVES = (*_ALONE, *(f"-{each}" for each in _ALONE), "%")


class MixedSource(Section):
    """One entry of task.prompts where that is a list."""

    use: str
    """Source of rows, in a form of task.prompts that is no list."""
    weight: Annotated[float, Field(ge=0)] = 0.0
    """Share of groups of this source, relative to the other weights; without any, all rows are drawn equally often."""
    columns: dict[str, str] = Field(default={})
    """Columns of this source, beside those of task.columns."""
    options: Options = Field(default={})
    """Keyword arguments of this source, beside those of task.options."""

    @model_validator(mode="before")
    @classmethod
    def _text_is_short_for_use(cls, value: Any) -> Any:
        return {"use": value} if isinstance(value, str) else value


def _all_or_none_weighted(sources: tuple[MixedSource, ...]) -> tuple[MixedSource, ...]:
    """Refuses weights of some sources only: the others would never be drawn."""
    lacking = [each.use for each in sources if not each.weight]
    if lacking and len(lacking) < len(sources):
        raise ValueError(f"{' and '.join(lacking)} has no weight, and others have one: write a weight over 0 for each")
    return sources


def _own_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """Refuses arguments that asyncrl gives the chat template."""
    if decided := sorted(set(given) & DECIDED):
        raise ValueError(f"asyncrl gives the chat template its {' and '.join(decided)}: remove it here")
    return given


def _date(given: str) -> str:
    """Refuses what is no date."""
    try:
        return given and date.fromisoformat(given).isoformat()
    except ValueError:
        raise ValueError(f"{given} is no date: write one such as 2026-11-28") from None


SOURCE = "a source"
SOURCES = "sources"
"""Names of the two forms of task.prompts, which pydantic puts into the location of a mistake."""
Sources = Annotated[tuple[MixedSource, ...], Field(min_length=1)]
SourceOrSources = Annotated[
    Annotated[str, Tag(SOURCE)] | Annotated[Sources, AfterValidator(_all_or_none_weighted), Tag(SOURCES)],
    Discriminator(lambda value: SOURCES if isinstance(value, list | tuple) else SOURCE),
]


class TaskConfig(Section):
    """The prompts to train on, and the size of a batch."""

    prompts: SourceOrSources
    """Source of the prompts: a JSONL, JSON, CSV (also .gz) or Parquet file, a folder of such files (FOLDER,
    FOLDER#SPLIT), `hub:NAME[:CONFIG][#SPLIT]`, `reasoning_gym:NAME`, `FILE.py:function` or `module:function`; or a list
    of sources, each also as a table."""
    columns: dict[str, str] = Field(default={})
    """Columns by the names that rewards give them: { prompt = "question" }. A dot leads into nested columns; "" leaves
    a column out."""
    options: Options = Field(default={})
    """Arguments of a procedural source, such as { max_terms = 3 }, or of datasets.load_dataset."""
    epochs: Positive | None = None
    """Number of passes over the rows, in place of `steps`; rows of dropped groups count too."""
    shuffle: bool = True
    """Draws the rows of each epoch in another order."""
    curriculum: str = ""
    """Function FILE.py:NAME or module:NAME of a step, from 0, that returns the weights of the sources."""
    prompts_per_step: Positive = 8
    """Number of prompts, and so of groups, in one training step (B)."""
    samples_per_prompt: Positive = 8
    """Number of samples of each prompt (G)."""
    system: str = ""
    """System message before every prompt; prompts that are text become chat messages."""
    text_prompts: Literal["raw", "chat"] = "raw"
    """Treatment of text prompts where the model has a chat template: as they are (raw), or as a message of the user
    (chat)."""
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_own_arguments)] = Field(default={})
    """Further arguments of the chat template, such as { enable_thinking = false }."""
    date: Annotated[str, AfterValidator(_date)] = ""
    """Date for chat templates that ask for today's, such as "2026-11-28"; default: that of the run's first start."""
    size: Positive = 1000
    """Rows that a procedural source makes, or that are read of a stream."""
    max_prompt_tokens: Positive = 512
    """Largest number of tokens of a prompt."""
    max_picture_pixels: Positive = 1280 * 28 * 28
    """Largest number of pixels of a picture; a larger one ends the run."""
    long_prompts: Literal["error", "skip", "truncate"] = "error"
    """Treatment of longer prompts: an error before sampling, `skip`, or `truncate` the beginning of their longest
    message."""
    pretrain: str = ""
    """Texts for algorithm.pretrain_coefficient: rows of `text`, or of `prompt` and `answer`, from a source as in
    `prompts`, without `columns` and `options`."""
    pretrain_per_step: Positive = 32
    """Number of these texts in one step."""

    @property
    def template_clock(self) -> dict[str, dict[str, str]]:
        """Returns the argument of `with_clock` templates: what each directive of strftime gives at the beginning of
        `date`."""
        now = datetime.fromisoformat(self.date) if self.date else datetime.now()
        return {CLOCK: {f"%{each}": now.strftime(f"%{each}") for each in DIRECTIVES}}

    @property
    def template_arguments(self) -> dict[str, Any]:
        """Returns the arguments of the policy's chat template besides messages and tools."""
        return {**self.template_clock, **self.chat_template_kwargs}

    @property
    def sources(self) -> tuple[MixedSource, ...]:
        """Returns the sources of the prompts; a single one as a list of one."""
        return (MixedSource(use=self.prompts),) if isinstance(self.prompts, str) else self.prompts
