"""docs/models.md has the tables of the families and optimizers that the code knows."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.config.sections.training_config import optimizer_table
from asyncrl.engines.models.model_families import REFUSED, TRAINED
from asyncrl.engines.models.prompt_pictures import WITH_PICTURES

PAGE = (Path(__file__).parents[2] / "docs/models.md").read_text()


def family_table() -> Iterator[str]:
    """Yields the lines of the tables in docs/models.md."""
    yield from ("| `model_type` | beside plain causal attention |", "|---|---|")
    for name, special in TRAINED.items():
        yield f"| `{name}` | {special} |"
    for name in WITH_PICTURES:
        yield f"| `{name}` | pictures ([prompts](prompts.md#pictures)), positions in three dimensions |"
    yield from ("", "| refused | because |", "|---|---|")
    for reason in dict.fromkeys(REFUSED.values()):
        names = ", ".join(f"`{name}`" for name, why in REFUSED.items() if why == reason)
        yield f"| {names} | {reason} |"


@pytest.mark.parametrize("table", [family_table, optimizer_table], ids=["families", "optimizers"])
def test_the_page_has_the_table(table: object) -> None:
    expected = "\n".join(table())
    assert expected in PAGE, f"write it anew:\n{expected}"


def test_no_family_is_trained_and_refused() -> None:
    assert not set(TRAINED) & set(REFUSED)
