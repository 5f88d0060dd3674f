"""docs/reference/config.md is what the schema gives, and every text in it is a sentence about its key."""

import re
from pathlib import Path

import pytest

from asyncrl.config.sources.keys import Key, all_keys
from asyncrl.deploy.commands.keys import reference

PAGE = Path(__file__).parents[2] / "docs/reference/config.md"
RIDDLES = re.compile(r"(Of|What|Whether|The same|As|Those|Whoever|Where|How)\b")


def test_config_reference_matches_the_schema() -> None:
    assert PAGE.read_text() == reference(), "write it anew: asyncrl keys --markdown > docs/reference/config.md"


@pytest.mark.parametrize("key", all_keys().values(), ids=lambda key: key.name)
def test_every_key_is_explained(key: Key) -> None:
    assert re.fullmatch(r"[A-Z`].*\.", key.doc), key.name
    assert not RIDDLES.match(key.doc), key.doc
