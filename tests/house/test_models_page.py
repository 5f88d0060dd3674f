"""docs/models.md has the tables of the families and optimizers that the code knows."""

from pathlib import Path

import pytest

from asyncrl.config.sections.training.optimizers import optimizer_table
from asyncrl.engines.models.model_families import REFUSED, TRAINED, family_table

PAGE = (Path(__file__).parents[2] / "docs/models.md").read_text()


@pytest.mark.parametrize("table", [family_table, optimizer_table], ids=["families", "optimizers"])
def test_the_page_has_the_table(table: object) -> None:
    expected = "\n".join(table())
    assert expected in PAGE, f"write it anew:\n{expected}"


def test_no_family_is_trained_and_refused() -> None:
    assert not set(TRAINED) & set(REFUSED)
