"""What a resumed run may change."""

import re
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import Config
from asyncrl.config.sources.keys import all_keys
from asyncrl.config.sources.resume import check_resume, compare, may_change
from asyncrl.config.toml_writer import dump
from asyncrl.errors import ConfigError
from tests import golden


def config(**sections: Any) -> Config:
    return Config.model_validate({"model": {"name": "m"}, "task": {"prompts": "p"}, **sections})


def test_the_same_config_has_no_changes() -> None:
    assert compare(config(), config()) == []


def test_changes_are_named_with_both_values_and_whether_they_may_be() -> None:
    new = config(steps=200, training={"learning_rate": 1e-3}, fleet={"threads": 4})
    changes = {change.key: change for change in compare(config(), new)}
    assert list(changes) == ["steps", "training.learning_rate", "fleet.threads"]
    assert changes["training.learning_rate"].why_not
    assert not changes["steps"].why_not
    assert not changes["fleet.threads"].why_not
    assert "1e-06 -> 0.001" in str(changes["training.learning_rate"])


def test_steps_may_not_change_when_the_learning_rate_depends_on_them() -> None:
    schedule = {"training": {"schedule": "cosine"}}
    (change,) = compare(config(**schedule), config(steps=7, **schedule))
    assert "cosine" in change.why_not


@pytest.mark.parametrize(
    ("old", "new", "refused"),
    [("dense", "sparse", False), ("sparse", "dense", False), ("dense", "fp8", True), ("bfloat16", "sparse", True)],
)
def test_only_codecs_that_do_not_round_may_change(old: str, new: str, refused: bool) -> None:
    (change,) = compare(config(weights={"codec": old}), config(weights={"codec": new}))
    assert bool(change.why_not) == refused


def test_what_a_resume_may_change_is_listed_in_its_section() -> None:
    changeable = [name for name in all_keys() if may_change(name)]
    assert {"name", "steps", "pools", "fleet.wire", "training.layout", "reward.workers", "cost.workers"} <= {
        *changeable
    }
    assert {"generation.layout", "critic.pool", "cost_critic.device", "weights.folder"} <= {*changeable}
    assert {"seed", "model.name", "training.learning_rate", "staleness.limit", "weights.codec"}.isdisjoint(changeable)


def test_a_refused_resume_shows_the_diff_and_the_ways_out(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(dump(config()))
    new = config(staleness={"limit": 5}, steps=7)
    with pytest.raises(ConfigError) as refused:
        check_resume(tmp_path, new, accept=False)
    assert "staleness.limit: 2 -> 5" in str(refused.value)
    assert "steps" not in str(refused.value)
    assert "--accept-changes" in str(refused.value)
    assert [change.partition(":")[0] for change in check_resume(tmp_path, new, accept=True)] == [
        "steps",
        "staleness.limit",
    ]
    assert [change.partition(":")[0] for change in check_resume(tmp_path, config(steps=7), accept=False)] == ["steps"]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"reward": {"functions": [{"use": "/new/mine.py:f", "options": {"words": "a.json"}}]}}, ""),
        ({"reward": {"functions": [{"use": "/new/mine.py:g", "options": {"words": "a.json"}}]}}, "/new/mine.py:g"),
        ({"reward": {"functions": [{"use": "/new/mine.py:f", "by_token": True}]}}, "by_token = true"),
        ({"task": {"prompts": "/new/rows.jsonl"}}, ""),
        ({"task": {"prompts": "/new/mine.py:rows"}}, "/new/mine.py:rows"),
        ({"environment": {"use": "e:E", "options": {"functions": ["/new/tools.py:f"], "data": "a.csv"}}}, ""),
        ({"environment": {"use": "e:E", "options": {"functions": ["/new/tools.py:f"], "most": 2}}}, "most = 2"),
        ({"environment": {"use": "e:E", "options": {"functions": ["/new/tools.py:f"], "data": "b.csv"}}}, "b.csv"),
        ({"reward": {"functions": [{"use": "/new/mine.py:f", "options": {"words": "b.json"}}]}}, "b.json"),
    ],
)
def test_a_file_may_move_but_nothing_else_changes_with_it(changed: dict[str, Any], says: str, tmp_path: Path) -> None:
    before = {
        "task": {"prompts": "/old/rows.jsonl"},
        "reward": {"functions": [{"use": "/old/mine.py:f", "options": {"words": "a.json"}}]},
        "environment": {"use": "e:E", "options": {"functions": ["/old/tools.py:f"], "data": "a.csv"}},
    }
    (tmp_path / "config.toml").write_text(dump(config(**before)))
    same = {"task.prompts", "reward.functions", "environment.options"}
    if says:
        with pytest.raises(ConfigError, match=re.escape(says)):
            check_resume(tmp_path, config(**(before | changed)), accept=False, same=same)
    else:
        assert len(check_resume(tmp_path, config(**(before | changed)), accept=False, same=same)) == 1


def test_changed_tables_read_as_in_the_file() -> None:
    functions = [{"use": "mine.py:f", "weight": 2.0}, "exact_match"]
    (change,) = compare(config(), config(reward={"functions": functions}))
    assert str(change).startswith(
        'reward.functions: [] -> [{ use = "mine.py:f", weight = 2.0 }, { use = "exact_match" }]  ('
    )
    (change,) = compare(config(), config(staleness={"cut_at": 3}))
    assert str(change).startswith("staleness.cut_at: none -> 3  (")


def test_a_changed_file_is_refused_like_a_changed_key(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(dump(config()))
    files = {"reward.functions": ["reward.functions: r.py has changed"], "evaluate.prompts": ["evaluate.prompts: h"]}
    with golden.raises(ConfigError):
        check_resume(tmp_path, config(), accept=False, files=files)
    assert check_resume(tmp_path, config(), accept=True, files=files) == [text for (text,) in files.values()]
    assert check_resume(tmp_path, config(), accept=False, files={"evaluate.prompts": ["h"]}) == ["h"]


def test_a_file_that_only_moved_is_no_change_of_what_is_learnt(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(dump(config(task={"prompts": "/old/p.jsonl"})))
    new = config(task={"prompts": "/new/p.jsonl"})
    with pytest.raises(ConfigError, match="/old/p"):
        check_resume(tmp_path, new, accept=False)
    assert check_resume(tmp_path, new, accept=False, same={"task.prompts"}) == [
        'task.prompts: "/old/p.jsonl" -> "/new/p.jsonl"'
    ]
