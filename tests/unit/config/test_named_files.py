"""Relative paths begin in the folder of their file, or in the current one; files of a run are found."""

from pathlib import Path

import pytest

from asyncrl.config import user_code
from asyncrl.config.named_files import DATA_SUFFIXES, anchored, source_files
from asyncrl.config.schema import Config
from asyncrl.config.sources import load
from asyncrl.config.sources.resume import check_resume
from asyncrl.config.toml_writer import dump
from asyncrl.errors import ConfigError
from asyncrl.tasks.reading.row_files import READERS

TOML = """\
model.name = "m"
task.prompts = "data/p.jsonl"
algorithm.custom = "../mine.py:ALGORITHM"
weights.folder = "weights"
environment.options = { functions = ["t.py:add", "m:f"], form = "t.py:add" }
reward.functions = ["r.py:right", { use = "trl:r.py:other", weight = 2 }, "numeric", "package.module:f"]
"""


def test_paths_of_a_file_begin_in_its_folder_and_flags_in_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, here = tmp_path / "experiments", tmp_path / "here"
    folder.mkdir()
    here.mkdir()
    (folder / "e.toml").write_text(TOML)
    monkeypatch.chdir(here)
    flags = ("--evaluate.prompts", "held.csv", "--model.name", "./model")
    config = load("../experiments/e.toml", flags, {"ASYNCRL_REWARD__MODEL": "./scorer"}).config
    assert config.task.prompts == f"{folder}/data/p.jsonl"
    assert config.algorithm.custom == f"{tmp_path}/mine.py:ALGORITHM"
    uses = [each.use for each in config.reward.functions]
    assert uses == [f"{folder}/r.py:right", f"trl:{folder}/r.py:other", "numeric", "package.module:f"]
    assert (config.evaluate.prompts, config.model.name) == (f"{here}/held.csv", f"{here}/model")
    assert config.reward.model == f"{here}/scorer"
    assert config.weights.folder == f"{folder}/weights"
    options = {"functions": [f"{folder}/t.py:add", "m:f"], "form": "t.py:add"}
    assert config.environment.options == options
    assert [(key, str(path)) for key, path in source_files(config)] == [
        ("task.prompts", f"{folder}/data/p.jsonl"),
        ("evaluate.prompts", f"{here}/held.csv"),
        ("algorithm.custom", f"{tmp_path}/mine.py"),
        ("reward.functions", f"{folder}/r.py"),
        ("reward.functions", f"{folder}/r.py"),
        ("environment.options", f"{folder}/t.py"),
    ]


@pytest.mark.parametrize(
    "value", ["hub:name", "reasoning_gym:chain_sum", "module:function", "warmed:reverse", "HuggingFaceTB/SmolLM2", ""]
)
def test_what_is_no_path_stays(value: str, tmp_path: Path) -> None:
    assert anchored("model.name", value, tmp_path) == anchored("task.prompts", value, tmp_path) == value
    assert anchored("task.system", "see data.csv", tmp_path) == "see data.csv"


def test_a_model_is_a_path_where_its_folder_is(tmp_path: Path) -> None:
    (tmp_path / "models/tiny").mkdir(parents=True)
    assert anchored("model.name", "models/tiny", tmp_path) == f"{tmp_path}/models/tiny"


def test_the_run_of_an_older_version_is_read_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "journal").touch()
    (run / "config.toml").write_text('model.name = "m"\ntask.prompts = "p.jsonl"\n')
    monkeypatch.chdir(tmp_path)
    new = load(None, ("--model.name", "m", "--task.prompts", "p.jsonl", "--name", "config"), {}).config
    assert check_resume(run, new, accept=False) == []
    (run / "config.toml").write_text(dump(new))
    assert load(run / "config.toml", (), {}).config == new


def test_every_reader_of_rows_reads_a_path() -> None:
    assert tuple(READERS) == DATA_SUFFIXES


IMPORTING = """\
import json, helpers, tools.strict as strict
from torchless import nothing
def late():
    from tools import loose
"""


@pytest.fixture
def reward(tmp_path: Path) -> Path:
    """Returns a reward that imports a file and a package beside it; beside them are files that it does not import. The
    folder has no `__init__.py`, so no test may import a file of its name: Python would prefer the file."""
    (tmp_path / "rewards_of_mine/tools").mkdir(parents=True)
    for name, text in {
        "reward.py": IMPORTING,
        "helpers.py": "import reward\nfrom asyncrl import fleet\n",
        "tools/__init__.py": "",
        "tools/strict.py": "from . import words\nfrom ..outside import x\nfrom ... import y\n",
        "tools/loose.py": "this is no Python",
        "tools/words.py": "",
        "words.py": "",
        "tools.py": "",
        "asyncrl/fleet.py": "",
        "../outside.py": "",
        "../torchless.py": "",
    }.items():
        (tmp_path / "rewards_of_mine" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "rewards_of_mine" / name).write_text(text)
    return tmp_path / "rewards_of_mine/reward.py"


def read_with(use: str) -> list[str]:
    """Returns the paths of the files that a run with this reward function reads, beside those of a second term."""
    values = {
        "model": {"name": "m"},
        "task": {"prompts": "p"},
        "reward": {"functions": [use, {"use": use, "name": "twin"}]},
    }
    return [str(path) for _, path in source_files(Config.model_validate(values))]


def test_what_a_file_imports_from_its_own_folder_is_read_too(reward: Path) -> None:
    mine = ["helpers.py", "tools/__init__.py", "tools/strict.py", "tools/loose.py", "tools/words.py"]
    assert read_with(f"{reward}:late") == [
        str(reward),
        *(str(reward.parent / name) for name in mine),
        str(reward),
    ]


def test_what_a_module_imports_from_its_own_package_is_read_too(reward: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(reward.parent.parent))
    (reward.parent / "own.py").write_text(
        "import rewards_of_mine.words\nfrom rewards_of_mine.tools.strict import x\nimport outside\n"
    )
    named = ["own.py", "words.py", "tools/__init__.py", "tools/strict.py", "tools/words.py"]
    assert read_with("rewards_of_mine.own:late")[:-1] == [str(reward.parent / name) for name in named]
    (reward.parent / "__init__.py").write_text("from rewards_of_mine import words\n")
    assert read_with("rewards_of_mine:late")[:-1] == [str(reward.parent / name) for name in ("__init__.py", "words.py")]


def test_nothing_is_followed_where_python_has_its_packages() -> None:
    assert [Path(each).name for each in read_with("statistics:mean")] == ["statistics.py"] * 2


def test_a_file_that_imports_too_many_is_refused(reward: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_code, "MOST_IMPORTED", 6)
    assert len(read_with(f"{reward}:late")) == 7
    monkeypatch.setattr(user_code, "MOST_IMPORTED", 5)
    with pytest.raises(ConfigError, match="imports more than 5 files of its own folder"):
        read_with(f"{reward}:late")
