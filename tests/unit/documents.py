"""The examples of a page of the documentation, as a user would save them."""

import re
from pathlib import Path

from asyncrl.config.schema import Config
from asyncrl.config.sources import load

DOCS = Path(__file__).parents[2] / "docs"
START = {"model": '[model]\nname = "m"\n', "task": '[task]\nprompts = "rows.jsonl"\n'}
"""Sections that an example leaves out, because they are the same everywhere."""


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)


def files_of(page: str, folder: Path) -> dict[str, Path]:
    """Writes each Python example, whose first line names its file, into the folder."""
    found = {}
    for source in blocks(page, "python"):
        name = source.partition("\n")[0].removeprefix("# ")
        found[name] = folder / name
        found[name].write_text(source)
    return found


def config_of(page: str, containing: str, folder: Path, **replaced: str) -> Config:
    """Returns the config of the one TOML example that has this text. replaced: values of the example by its own."""
    (text,) = [text for text in blocks(page, "toml") if containing in text]
    for old, new in replaced.items():
        assert old in text
        text = text.replace(old, new)
    text = "".join(start for name, start in START.items() if f"[{name}]" not in text) + text
    (folder / "example.toml").write_text(text)
    return load(folder / "example.toml", environ={}).config
