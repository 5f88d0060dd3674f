"""Renders one sample for a terminal."""

from rich.panel import Panel
from rich.text import Text

from asyncrl.telemetry.samples_file import SampleRecord


def sample_panel(sample: SampleRecord, characters: int | None = None) -> Panel:
    """Renders one sample: prompt, completion, reward, and what was trained of it."""
    text = _short(sample.text, characters)
    body = Text.assemble(
        (_short(sample.prompt, characters), "dim"),
        "\n",
        (text or "(nothing)", "bold" if text else "dim italic"),
        (f"\n{_summary(sample)}", "cyan"),
    )
    title = f"step {sample.step} · group {sample.group} · member {sample.member}"
    return Panel(body, title=title, title_align="left")


def _summary(sample: SampleRecord) -> str:
    reward = "no reward" if sample.reward is None else f"reward {sample.reward:.3g}"
    terms = ", ".join(f"{name} {value:.3g}" for name, value in sample.terms.items()) if len(sample.terms) > 1 else ""
    parts = [f"{reward} ({terms})" if terms else reward]
    if sample.advantage is not None:
        parts.append(f"advantage {sample.advantage:+.3g}")
    single = sample.first == sample.last
    versions = f"version {sample.first}" if single else f"versions {sample.first} to {sample.last}"
    parts += [f"ended by {sample.finish}", versions, f"{sample.trained} tokens trained"]
    if sample.masked:
        parts.append(f"{sample.masked} masked ({sample.reason})")
    if sample.rejected:
        parts.append(f"{sample.rejected} rejected by the correction")
    return " · ".join(parts)


def _short(text: str, characters: int | None) -> str:
    # Without control characters: a model may write escape sequences, which a terminal would execute.
    text = "".join(each if each.isprintable() or each in "\n\t" else "\N{REPLACEMENT CHARACTER}" for each in text)
    if characters is None or len(text) <= characters:
        return text
    half = characters // 2
    return f"{text[:half]} … {text[-half:]}"
