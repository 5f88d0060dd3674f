"""Run directories of older versions: a renamed key or a moved task is refused with the line to change."""

from pathlib import Path

import pytest

from asyncrl.config.schema import Config
from asyncrl.config.sources.resume import check_resume
from asyncrl.config.toml_writer import dump
from asyncrl.config.user_code import source_problem
from asyncrl.errors import ConfigError
from asyncrl.tasks import training_prompts
from tests import golden

OLD_TASK = "asyncrl.tasks.reverse:training"


def config(prompts: str = "asyncrl.tasks.builtin.reverse:training", custom: str = "") -> Config:
    return Config.model_validate(
        {"model": {"name": "m"}, "task": {"prompts": prompts}, "algorithm": {"custom": custom}}
    )


def write_run(run_dir: Path, text: str) -> Path:
    (run_dir / "config.toml").write_text(text)
    return run_dir


def test_the_old_key_of_an_own_algorithm_is_named_with_its_line(tmp_path: Path) -> None:
    new = config(custom="/mine.py:ALGORITHM")
    text = dump(new).replace("custom =", "page =")
    line = text.splitlines().index('page = "/mine.py:ALGORITHM"') + 1
    says = (
        rf"config\.toml:{line}: algorithm\.page: there is no such key; write algorithm\.custom \(the key was renamed\)"
    )
    with pytest.raises(ConfigError, match=says):
        check_resume(write_run(tmp_path, text), new, accept=False)
    assert check_resume(write_run(tmp_path, dump(new)), new, accept=False) == []


def test_the_old_number_of_ranks_is_passed_over_where_it_is_one_and_named_with_the_new_table_otherwise(
    tmp_path: Path,
) -> None:
    text = dump(config()).replace("[training]\n", "[training]\nlayout_dp = 1\n")
    assert check_resume(write_run(tmp_path, text), config(), accept=False) == []
    says = r"training\.layout_dp: there is no such key; write training\.layout \(a table: layout = \{ dp = N \}\)"
    with pytest.raises(ConfigError, match=says):
        check_resume(write_run(tmp_path, text.replace("layout_dp = 1", "layout_dp = 2")), config(), accept=False)


def test_the_only_grouping_of_ranks_that_sample_is_passed_over_and_the_other_one_named(tmp_path: Path) -> None:
    text = dump(config()).replace("[generation]\n", '[generation]\ngrouping = "zero-redundancy"\n')
    assert check_resume(write_run(tmp_path, text), config(), accept=False) == []
    with golden.raises(ConfigError, match=r"generation\.grouping"):
        check_resume(write_run(tmp_path, text.replace("zero-redundancy", "vanilla")), config(), accept=False)


def test_the_old_name_of_a_task_is_refused_with_the_new_one() -> None:
    with pytest.raises(ConfigError, match=r"task\.prompts: .*: write asyncrl\.tasks\.builtin\.reverse$"):
        training_prompts(config(OLD_TASK))
    problem = source_problem("asyncrl.tasks.opening:opened", "reward.functions")
    golden.says(str(problem), "reward.functions", "asyncrl.tasks.opening")
    assert str(problem).endswith("write asyncrl.tasks.builtin.first_token")


def test_a_resume_with_the_new_name_of_a_task_shows_the_change(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, dump(config(OLD_TASK)))
    with pytest.raises(
        ConfigError, match=rf'task\.prompts: "{OLD_TASK}" -> "asyncrl\.tasks\.builtin\.reverse:training"'
    ):
        check_resume(run_dir, config(), accept=False)
    assert len(check_resume(run_dir, config(), accept=True)) == 1
