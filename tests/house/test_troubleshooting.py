"""docs/troubleshooting.md: what it quotes is what the code says."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SYMPTOMS = [line.split(" | ")[0] for line in (ROOT / "docs/troubleshooting.md").read_text().splitlines()]
QUOTED = sorted({quote for symptom in SYMPTOMS for quote in re.findall(r'"([^"]+)"', symptom)})
SOURCES = [path for folder in ("asyncrl", "services", "deploy") for path in (ROOT / folder).rglob("*.py")]


@pytest.fixture(scope="module")
def said() -> str:
    """All sources, with strings that go on in the next line joined and what is filled in left open."""
    text = re.sub(r'"\n\s*f?"', "", "\n".join(path.read_text() for path in SOURCES))
    return re.sub(r"\{[^{}\n]*\}", "N", text)


@pytest.mark.parametrize("quote", QUOTED)
def test_what_it_quotes_is_said(quote: str, said: str) -> None:
    assert quote in said or quote.removeprefix("/dev/shm ") in said
