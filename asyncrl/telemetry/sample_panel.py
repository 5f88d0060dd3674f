"""Renders one sample for a terminal."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from rich.console import Console, ConsoleOptions, Group
from rich.panel import Panel
from rich.text import Text

from asyncrl.telemetry.samples_file import SampleRecord

Styled: TypeAlias = tuple[str, str]
"""A text and its style."""


def sample_panel(sample: SampleRecord, characters: int | None = None) -> Panel:
    """Renders one sample: prompt, completion or turns, reward, and what was trained of it."""
    said = _turns(sample, characters) if sample.turns else [_answer(sample.text, characters)]
    body = Group(Text.assemble((_short(sample.prompt, characters), "dim"), "\n", *said), Items(_summary(sample), " · "))
    title = f"step {sample.step} · group {sample.group} · member {sample.member}"
    return Panel(body, title=title, title_align="left")


def filled(items: Iterable[str], width: int, heading: str = "", gap: str = "  ") -> list[str]:
    """Returns lines of whole items, which are indented after the first one; an item that is longer has its own line."""
    lines, first = [heading], True
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


def _answer(text: str, characters: int | None) -> Styled:
    return (_short(text, characters), "bold") if text else ("(nothing)", "dim italic")


def _turns(sample: SampleRecord, characters: int | None) -> Iterator[Styled]:
    """Yields who said what in an episode, and the reward of each turn of the policy."""
    rewards = iter(sample.turn_rewards)
    for number, message in enumerate(sample.turns):
        role, text = str(message.get("role")), str(message.get("content") or "")
        own = role == "assistant"
        reward = next(rewards, None) if own else None
        yield (f"{chr(10) if number else ''}{_short(role, characters)}: ", "cyan")
        yield _answer(text, characters) if own else (_short(text, characters), "dim")
        if reward is not None:
            yield (f"  [reward {reward:.3g}]", "cyan")


def _summary(sample: SampleRecord) -> list[str]:
    reward = "no reward" if sample.reward is None else f"reward {sample.reward:.3g}"
    terms = ", ".join(f"{name} {value:.3g}" for name, value in sample.terms.items()) if len(sample.terms) > 1 else ""
    parts = [f"{reward} ({terms})" if terms else reward]
    if sample.advantage is not None:
        parts.append(f"advantage {sample.advantage:+.3g}")
    if sample.turn_rewards:
        parts.append(f"{len(sample.turn_rewards)} turns")
    single = sample.first == sample.last
    versions = f"version {sample.first}" if single else f"versions {sample.first} to {sample.last}"
    parts += [f"ended by {sample.finish}", versions, f"{sample.trained} tokens trained"]
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
