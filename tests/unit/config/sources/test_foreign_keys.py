"""Names of TRL, transformers and verl: each has an answer, and no answer is a guess."""

import ast
import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.sources import load
from asyncrl.config.sources.keys import (
    EXPLAINED,
    UNSUPPORTED,
    all_keys,
    foreign_rules,
    keys_with_tables,
    table_keys,
    translate,
)
from asyncrl.config.sources.layers import flags_layer
from asyncrl.errors import ConfigError
from tests import golden

GUIDES = Path(__file__).parents[4] / "docs/guides"
RELEASES = {"trl": "1.16.0", "verl": "0.9.1"}
"""Releases whose names the tables have."""
CLASSES = {
    "trl": {
        "trainer/grpo_config.py": "GRPOConfig",
        "trainer/base_config.py": "_BaseConfig",
        "experimental/async_grpo/async_grpo_config.py": "AsyncGRPOConfig",
    },
    "transformers": {"training_args.py": "TrainingArguments"},
}
"""Classes whose fields are names, by file."""
SCRIPTS = [
    *("peft_config", "train_dataset", "eval_dataset", "processing_class", "reward_funcs"),
    *("reward_processing_classes", "tools", "rollout_func", "callbacks", "environment_factory"),
    *("max_prompt_length", "use_peft", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules"),
    *("load_in_4bit", "load_in_8bit", "attn_implementation", "torch_dtype", "model_name_or_path"),
    *("model_revision", "dataset_name", "dataset_config", "dataset_train_split"),
]
"""Arguments of TRL's trainers and scripts."""


def fields(package: str) -> list[str]:
    """Names of the fields of the classes of an installed package, which is read and not imported."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed; scripts/test environments installs it")
    found = []
    for file, name in CLASSES[package].items():
        tree = ast.parse((Path(spec.origin).parent / file).read_text())
        (defined,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
        found += [
            each.target.id for each in defined.body if isinstance(each, ast.AnnAssign) and hasattr(each.target, "id")
        ]
    return found


def leaves(table: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in table.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        elif name not in ("_target_", "defaults"):
            yield prefix + name


def verl_leaves() -> list[str]:
    yaml = pytest.importorskip("yaml")
    spec = find_spec("verl")
    if spec is None or spec.origin is None:
        pytest.skip("verl is not installed; scripts/test environments installs it")
    return list(
        leaves(yaml.safe_load((Path(spec.origin).parent / "trainer/config/_generated_ppo_trainer.yaml").read_text()))
    )


def of_the_tables(trainer: str, name: str) -> bool:
    return any(rule.names.match(name) for rule in foreign_rules()[trainer])


@pytest.mark.parametrize("package", ["transformers", "trl"])
def test_every_field_has_an_answer_that_is_no_guess(package: str) -> None:
    found = fields(package)
    assert len(found) > 100
    assert [name for name in found if name not in all_keys() and translate(name) is None] == []


def test_every_leaf_of_verl_has_an_answer_in_its_table() -> None:
    found = verl_leaves()
    assert len(found) > 800
    assert [name for name in found if name not in all_keys() and not of_the_tables("verl", name)] == []


def test_every_pattern_is_about_a_name_of_verl() -> None:
    found = verl_leaves()
    assert [rule.names.pattern for rule in foreign_rules()["verl"] if not any(map(rule.names.match, found))] == []


@pytest.mark.parametrize("package", RELEASES)
def test_the_installed_release_is_the_one_of_the_tables(package: str) -> None:
    try:
        assert version(package) == RELEASES[package]
    except PackageNotFoundError:
        pytest.skip(f"{package} is not installed; scripts/test environments installs it")


@pytest.mark.parametrize("name", SCRIPTS)
def test_arguments_of_trainers_and_scripts_have_answers(name: str) -> None:
    assert translate(name) is not None


def test_answers_name_keys_that_exist_or_give_a_reason() -> None:
    for rules in foreign_rules().values():
        for rule in rules:
            key, says = rule.answer
            assert key in all_keys() if key else says.startswith(tuple(EXPLAINED.values())), rule.answer
            named = set(re.findall(r"(?<![\w./-])([a-z_]+\.[a-z_]+)(?![\w(.])", says))
            ours = {each for each in named if each.partition(".")[0] in {key.partition(".")[0] for key in all_keys()}}
            assert ours <= {*all_keys(), *table_keys()}, (rule.answer, ours)


def test_no_key_of_ours_is_taken_for_a_name_of_others() -> None:
    verl = [key.name for key in keys_with_tables() if of_the_tables("verl", key.name)]
    trl = [key.name for key in keys_with_tables() if "." in key.name and of_the_tables("trl", key.name)]
    assert (verl, trl) == ([], [])


@pytest.mark.parametrize("name", golden.cases(__file__, "test_answers"), ids=str)
def test_answers(name: str) -> None:
    (problem,) = flags_layer((f"--{name}", "1")).problems
    golden.says(problem)
    assert "did you mean" not in problem.text


def test_what_asyncrl_does_not_do_is_not_supported() -> None:
    for name, why in UNSUPPORTED.items():
        (problem,) = flags_layer((f"--{name}", "1")).problems
        assert problem.text == f"not supported: {why}"


@pytest.mark.parametrize("typed", ["evaluation.temperature", "stalenes.strategy", "trainng.seed", "generation.dtyp"])
def test_sections_of_ours_are_not_read_as_those_of_others(typed: str) -> None:
    assert translate(typed) is None


def mapped(page: str) -> Iterator[tuple[str, str]]:
    """Yields the names in the left column of the tables of a guide, each with the text of the right column."""
    for left, right in re.findall(r"^\| (.+?) \| (.+?) \|$", (GUIDES / page).read_text(), re.MULTILINE):
        for name in re.findall(r"`([a-z_][\w.]*)(?: = [^`]*)?`", left):
            yield name, right


@pytest.mark.parametrize(("name", "here"), [each for page in ("from-trl.md", "from-verl.md") for each in mapped(page)])
def test_tables_of_guides_say_what_refusals_say(name: str, here: str) -> None:
    answer = translate(name)
    assert answer is not None, name
    key, says = answer
    assert f"`{key}" in here if key else set(re.findall(r"[\w./-]{6,}", says)) & set(re.findall(r"[\w./-]{6,}", here))


def commented(page: str) -> Iterator[tuple[str, str]]:
    """Yields the keys of the file of a guide, each with the name of another trainer that its comment begins with."""
    (text,) = re.findall(r"```toml\n(.*?)```", (GUIDES / page).read_text(), re.DOTALL)
    section = ""
    for line in text.splitlines():
        if header := re.match(r"\[(\w+)\]", line):
            section = f"{header[1]}."
        elif told := re.match(r"(\w+) = .*# ([a-z]+[._][\w.]*\w)(?=[:;,]|$| )", line):
            yield section + told[1], told[2]


@pytest.mark.parametrize(
    ("key", "name"), [each for page in ("from-trl.md", "from-verl.md") for each in commented(page)]
)
def test_comments_of_the_files_of_guides_say_what_refusals_say(key: str, name: str) -> None:
    answer = translate(name)
    assert answer is not None
    assert answer[0] == key


def test_a_file_of_verl_is_refused_with_every_line() -> None:
    values = tomllib.loads("\n".join(f"[a{number}]\nb = 1" for number in range(40)))
    with pytest.raises(ConfigError, match=r"^40 mistakes") as refused:
        load("quickstart", (), {}, values)
    assert all(f"a{number}.b: there is no such key" in str(refused.value) for number in range(40))
