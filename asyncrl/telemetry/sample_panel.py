"""Renders samples for a terminal: one, or the members of a group beside one another."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from rich.console import Console, ConsoleOptions, Group
from rich.panel import Panel
from rich.text import Text

from asyncrl.telemetry.samples_file import TRANSITIONS, SampleRecord

Styled: TypeAlias = tuple[str, str]
"""A text and its style."""


END_OF_PROMPT: Styled = ("\N{BLACK RIGHT-POINTING TRIANGLE}", "magenta")
"""Stands where the prompt ends, so that spaces at its end are seen."""
SPECIAL = "reverse"
SHARED = "dim"
"""Styles of special tokens, and of the beginning that an answer shares with the best one of its group."""


NO_COLUMNS: Mapping[str, object] = MappingProxyType({})
UNSHOWN = ("prompt", "tools")
"""Columns that the panel has already, or that say the same for each row."""
SHOWN_TRANSITIONS = 4
"""Transitions of a sample that are shown."""
SHOWN_COLUMNS = 8
SHOWN_VALUE = 120
"""Columns of a row that are shown, and characters of each."""


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Shows answers as the model wrote them. decode: returns the text of token ids, special ones included. names: texts
    of special tokens."""

    decode: Callable[[Sequence[int]], str]
    names: tuple[str, ...]

    def split(self, text: str, style: str) -> Iterator[Styled]:
        """Yields the parts of a text, special tokens with a style of their own."""
        pattern = "|".join(map(re.escape, sorted(filter(None, self.names), key=len, reverse=True)))
        for number, part in enumerate(re.split(f"({pattern})", text) if pattern else [text]):
            if part:
                yield part, SPECIAL if number % 2 else style


PLAIN = SpecialTokens(lambda ids: "", ())
"""Shows answers without a tokenizer: as rewards see them."""


def sample_panel(
    sample: SampleRecord,
    characters: int | None = None,
    tokens: SpecialTokens = PLAIN,
    columns: Mapping[str, object] = NO_COLUMNS,
) -> Panel:
    """Renders one sample: prompt, completion or turns, reward, and what was trained of it. columns: of its row."""
    said = _turns(sample, characters) if sample.turns else _answer(_written(sample, tokens), characters, tokens)
    text = Text.assemble(*_prompt(sample, characters, tokens), "\n", *said, *_transitions(sample))
    body = Group(text, *_row(columns), Items(_summary(sample), " · "))
    title = f"step {sample.step} · group {sample.group} · member {sample.member}"
    return Panel(body, title=title, title_align="left")


def group_panel(
    samples: Sequence[SampleRecord], tokens: SpecialTokens = PLAIN, columns: Mapping[str, object] = NO_COLUMNS
) -> Panel:
    """Renders the samples of one group: their prompt once, with columns of its row, then each answer, best first. What
    an answer shares with the beginning of the best one is dimmed."""
    ordered = sorted(samples, key=lambda each: (each.reward is None, -(each.reward or 0.0), each.member))
    best = _written(ordered[0], tokens)
    parts: list[Text | Items] = [Text.assemble(*_prompt(ordered[0], None, tokens)), *_row(columns)]
    for sample in ordered:
        text = _written(sample, tokens)
        shared = _shared(best, text) if sample is not ordered[0] else 0
        said = (
            _turns(sample, None)
            if sample.turns
            else [(_short(text[:shared], None), SHARED), *_rest(text, shared, tokens)]
        )
        parts += [Items([f"member {sample.member}", *_summary(sample)], " · "), Text.assemble(*said)]
    title = f"step {ordered[0].step} · group {ordered[0].group} · {len(ordered)} samples"
    return Panel(Group(*parts), title=title, title_align="left")


def _shared(best: str, text: str) -> int:
    """Returns how many characters two texts have in common at their beginning."""
    pairs = zip(best, text, strict=False)
    return next((number for number, (one, other) in enumerate(pairs) if one != other), min(len(best), len(text)))


def _written(sample: SampleRecord, tokens: SpecialTokens) -> str:
    """Returns what the model wrote, with special tokens where they are known."""
    return (tokens.decode(sample.token_ids) if sample.token_ids else "") or sample.text


def _prompt(sample: SampleRecord, characters: int | None, tokens: SpecialTokens) -> Iterator[Styled]:
    seen = (tokens.decode(sample.prompt_ids) if sample.prompt_ids else "") or sample.prompt
    yield from tokens.split(_short(seen, characters), "dim")
    yield END_OF_PROMPT


def filled(items: Iterable[str], width: int, heading: str = "", gap: str = "  ") -> list[str]:
    """Returns lines of whole items, which are indented after the first one; an item that is longer has its own line."""
    lines = [heading]
    first = True
    for item in items:
        longer = f"{lines[-1]}{'' if first else gap}{item}"
        if first or len(longer) <= width:
            lines[-1] = longer
        else:
            lines[-1] += gap.rstrip()
            lines.append(f"  {item}")
        first = False
    return lines


@dataclass
class Items:
    """Renders items on as many lines as the screen needs, none of them broken."""

    items: list[str]
    gap: str
    style: str = "cyan"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        width = options.max_width - len(self.gap.rstrip())
        yield Text("\n".join(filled(self.items, width, gap=self.gap)), self.style)


NO_TEXT = "(no text: the answer ended at once, or has special tokens only)"


def _row(columns: Mapping[str, object]) -> list[Items]:
    """Returns the columns of a row but its prompt, shortened."""
    shown = [f"{name} = {_short(str(value), SHOWN_VALUE)}" for name, value in columns.items() if name not in UNSHOWN]
    more = [f"{len(shown) - SHOWN_COLUMNS} more columns"] if len(shown) > SHOWN_COLUMNS else []
    return [Items(["row:", *shown[:SHOWN_COLUMNS], *more], " ", "green")] if shown else []


def _rest(text: str, shared: int, tokens: SpecialTokens) -> Iterator[Styled]:
    """Yields what an answer has behind its first `shared` characters."""
    if text[shared:] or not text:
        yield from _answer(text[shared:], None, tokens)


def _answer(text: str, characters: int | None, tokens: SpecialTokens = PLAIN) -> Iterator[Styled]:
    yield from tokens.split(_short(text, characters), "bold") if text else [(NO_TEXT, "dim italic")]


def _turns(sample: SampleRecord, characters: int | None) -> Iterator[Styled]:
    """Yields who said what in an episode, and the reward of each turn of the policy."""
    rewards = iter(sample.turn_rewards)
    for number, message in enumerate(sample.turns):
        role = str(message.get("role"))
        text = str(message.get("content") or "")
        own = role == "assistant"
        reward = next(rewards, None) if own else None
        yield (f"{chr(10) if number else ''}{_short(role, characters)}: ", "cyan")
        yield from _answer(text, characters) if own else [(_short(text, characters), "dim")]
        if reward is not None:
            yield (f"  [reward {reward:.3g}]", "cyan")
        if own and (ended := message.get("finish")):
            yield (f"  [ended by {_short(str(ended), characters)}]", "yellow")


def _transitions(sample: SampleRecord) -> Iterator[Styled]:
    """Yields the first transitions, a line each."""
    for number, each in enumerate(sample.transitions[:SHOWN_TRANSITIONS]):
        ended = f", {each['ended']}" if "ended" in each else ""
        yield f"\n{number}: in {each['observation']} action {each['action']}, reward {each['reward']}{ended}", "dim"
    if (more := len(sample.transitions) - SHOWN_TRANSITIONS) > 0:
        yield f"\n{more} more transitions in samples.jsonl", "dim"


def _summary(sample: SampleRecord) -> list[str]:
    reward = "no reward" if sample.reward is None else f"reward {sample.reward:.3g}"
    terms = ", ".join(f"{name} {value:.3g}" for name, value in sample.terms.items()) if len(sample.terms) > 1 else ""
    parts = [f"{reward} ({terms})" if terms else reward]
    acts = sample.finish == TRANSITIONS
    if sample.advantage is not None and not acts:  # Each transition has its own.
        parts.append(f"advantage {sample.advantage:+.3g}")
    if sample.turn_rewards:
        parts.append(f"{len(sample.turn_rewards)} turns")
    single = sample.first == sample.last
    versions = f"version {sample.first}" if single else f"versions {sample.first} to {sample.last}"
    unit = "transitions" if acts else "tokens"
    parts += [*([] if acts else [f"ended by {sample.finish}"]), versions, f"{sample.trained} {unit} trained"]
    if sample.masked:
        parts.append(f"{sample.masked} masked ({sample.reason})")
    if sample.rejected:
        parts.append(f"{sample.rejected} rejected by the correction")
    return parts


def _short(text: str, characters: int | None) -> str:
    # Without control characters: a model may write escape sequences, which a terminal would execute.
    text = "".join(each if each.isprintable() or each in "\n\t" else "\N{REPLACEMENT CHARACTER}" for each in text)
    if characters is None or len(text) <= characters:
        return text
    half = characters // 2
    return f"{text[:half]} … {text[-half:]}"
