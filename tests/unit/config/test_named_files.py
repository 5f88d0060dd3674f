"""Relative paths begin in the folder of their file, or in the current one; files of a run are found."""

import json
from pathlib import Path

import pytest

from asyncrl.config import user_code
from asyncrl.config.named_files import (
    DATA_SUFFIXES,
    anchored,
    code_folders,
    data_folder,
    is_of_gymnasium,
    source_files,
)
from asyncrl.config.schema import Config
from asyncrl.config.sections.named_values import ENVIRONMENTS
from asyncrl.config.sources import load
from asyncrl.config.sources.resume import check_resume
from asyncrl.config.toml_writer import dump
from asyncrl.environments.loading import ADAPTERS
from asyncrl.errors import ConfigError
from asyncrl.tasks.row_files import READERS
from tests import golden

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
    folder = tmp_path / "experiments"
    here = tmp_path / "here"
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
        ("environment.options", f"{folder}/t.py"),
        ("reward.functions", f"{folder}/r.py"),
        ("reward.functions", f"{folder}/r.py"),
        ("algorithm.custom", f"{tmp_path}/mine.py"),
        ("evaluate.prompts", f"{here}/held.csv"),
    ]


@pytest.mark.parametrize(
    "value", ["hub:name", "reasoning_gym:chain_sum", "module:function", "warmed:reverse", "HuggingFaceTB/SmolLM2", ""]
)
def test_what_is_no_path_stays(value: str, tmp_path: Path) -> None:
    assert anchored("model.name", value, tmp_path) == anchored("task.prompts", value, tmp_path) == value
    assert anchored("task.system", "see data.csv", tmp_path) == "see data.csv"


COMMANDS = [
    "agent:python my_agent.py rows.jsonl",
    "agent:./run.sh a.jsonl",
    "agent:x",
    "agent:python -m mine tools.py:main",
    "agent:C:\\tools\\agent.exe C:\\rows.csv",
    "mcp:my-server --config tools.json",
    "mcp:npx server --rows data.csv",
    "gymnasium:mine/table.parquet",
    "textarena:Game-v0.json",
    "openenv:http://localhost:8000/env.json",
    "verifiers:name?x=y.json",
    "tools",
    "rows.json",
]


@pytest.mark.parametrize("use", COMMANDS)
def test_an_environment_is_told_by_its_beginning_and_never_by_its_end(use: str, tmp_path: Path) -> None:
    """Also where a folder has its name."""
    (tmp_path / "agent:x").mkdir()
    assert anchored("environment.use", use, tmp_path) == use
    file = tmp_path / "e.toml"
    flags = ("--environment.use", use, "--model.name", "m", "--task.prompts", "p")
    file.write_text(f"environment.use = {json.dumps(use)}\nmodel.name = 'm'\ntask.prompts = 'p'\n")
    for config in (load(file, (), {}).config, load(None, flags, {}).config):
        assert config.environment.use == use
        assert use == "rows.json" or "environment.use" not in dict(source_files(config))


def test_beginnings_of_environments_are_those_of_the_adapters() -> None:
    assert set(ENVIRONMENTS) == set(ADAPTERS)


def test_files_and_folders_whose_names_look_like_a_beginning_are_found(tmp_path: Path) -> None:
    """A name with a colon is a file or a folder where no source of prompts begins so."""
    for name in ("agent:x", "C:\\rows", "hub:x", "pypi:x"):
        (tmp_path / name).mkdir()
    own = {"agent:x": True, "C:\\rows": True, "C:\\rows.jsonl": True, "agent:rows.csv": True}
    kept = {"hub:x": False, "hub:x.json": False, "python:rows": False, "s3://bucket/rows.jsonl": False}
    for value, is_path in (own | kept).items():
        assert anchored("task.prompts", value, tmp_path) == (f"{tmp_path}/{value}" if is_path else value)
        assert anchored("evaluate.sets", {"a": {"prompts": value}}, tmp_path) == {
            "a": {"prompts": f"{tmp_path}/{value}" if is_path else value}
        }
    assert anchored("model.name", "pypi:x", tmp_path) == "pypi:x"
    assert anchored("environment.use", "./agent:x/env.py:E", tmp_path) == f"{tmp_path}/agent:x/env.py:E"
    assert anchored("reward.functions", ["judge.json", "agent:x"], tmp_path) == ["judge.json", "agent:x"]
    assert data_folder("hub:x", tmp_path) is None
    assert data_folder("agent:x", tmp_path) == (tmp_path / "agent:x", "")


def test_code_of_a_module_whose_name_begins_like_a_source_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("hubble_rewards", "python_rewards"):
        (tmp_path / f"{name}.py").touch()
        monkeypatch.syspath_prepend(str(tmp_path))
        assert read_with(f"{name}:score") == [str(tmp_path / f"{name}.py")] * 2
        values = {"model": {"name": "m"}, "task": {"prompts": "p"}, "reward": {"functions": [f"{name}:score"]}}
        assert code_folders(Config.model_validate(values), "reward") == {tmp_path: False}


@pytest.mark.parametrize(
    ("env", "is_of_it"),
    [("CartPole-v1", True), ("mine:Env-v0", True), ("my-values.py:ENV", False), ("a-v1/env.py:ENV", False)],
)
def test_an_environment_to_act_in_is_told_by_its_name_and_not_by_its_path(env: str, is_of_it: bool) -> None:
    assert is_of_gymnasium(env) == is_of_it


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
    with golden.raises(ConfigError, match="5 files"):
        read_with(f"{reward}:late")
