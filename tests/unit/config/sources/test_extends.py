"""Files that take over the keys of others."""

from pathlib import Path

import pytest

from asyncrl.config.sources import load
from asyncrl.errors import ConfigError
from tests import golden

BASE = """
name = "base"
steps = 7
[model]
name = "models/tiny"
[task]
prompts = "rows.jsonl"
options = { a = 1 }
size = 5
"""


def written(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.toml").write_text(text)
    return folder / f"{next(iter(files))}.toml"


def test_a_file_takes_over_the_keys_of_its_base_and_replaces_some(tmp_path: Path) -> None:
    (tmp_path / "shared/models/tiny").mkdir(parents=True)
    (tmp_path / "shared/base.toml").write_text(BASE)
    mine = written(tmp_path, mine='extends = "shared/base.toml"\nsteps = 9\n[task]\noptions = { b = 2 }\n')
    loaded = load(mine, ["--task.size", "6"], {})
    config = loaded.config
    assert (config.name, config.steps, config.task.size, config.task.options) == ("mine", 9, 6, {"b": 2})
    assert config.task.prompts == f"{tmp_path}/shared/rows.jsonl", "paths of a base begin in its own folder"
    assert config.model.name == f"{tmp_path}/shared/models/tiny"
    assert loaded.sources["task.prompts"] == f"{tmp_path}/shared/base.toml:7"
    assert loaded.sources["steps"] == f"{mine}:2"


def test_bases_have_bases_and_later_ones_are_stronger(tmp_path: Path) -> None:
    mine = written(
        tmp_path,
        mine='extends = ["one.toml", "two.toml"]\n',
        one='extends = "quickstart"\nsteps = 1\nseed = 1\n',
        two="steps = 2\n",
    )
    config = load(mine, (), {}).config
    assert (config.steps, config.seed, config.name) == (2, 1, "mine")
    assert config.task.prompts == load("quickstart", (), {}).config.task.prompts


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"mine": 'extends = "bse.toml"', "base": BASE}, r"mine\.toml.*bse\.toml"),
        ({"mine": 'extends = "quickstrt"'}, r"mine\.toml.*'quickstrt'"),
        ({"mine": 'extends = "mine.toml"'}, r"mine\.toml -> .*mine\.toml$"),
        ({"mine": 'extends = "b.toml"', "b": 'extends = "mine.toml"'}, r"mine\.toml -> .*b\.toml -> .*mine\.toml$"),
        (
            {"mine": 'extends = "base.toml"', "base": BASE.replace("size = 5", "size = 0")},
            r"base\.toml:9: task\.size: ",
        ),
        ({"mine": 'extends = "base.toml"\n', "base": "this is no TOML"}, r"base\.toml.*TOML"),
    ],
)
def test_mistakes_name_the_file_that_has_them(files: dict[str, str], said: str, tmp_path: Path) -> None:
    with golden.raises(ConfigError, match=said):
        load(written(tmp_path, **files), (), {})
