"""Command line > environment > file > default, and every mistake at once."""

from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.config.sections.secret import Secret
from asyncrl.config.sources import Loaded, load
from asyncrl.errors import ConfigError
from asyncrl.experiments import experiments
from tests import golden

Loader = Callable[..., Loaded]

GOOD = """\
[model]
name = "m"

[task]
prompts = "p.jsonl"
size = 30
prompts_per_step = 3
"""


@pytest.fixture
def loading(tmp_path: Path) -> Loader:
    def load_text(text: str = GOOD, flags: str = "", **environ: str) -> Loaded:
        path = tmp_path / "mine.toml"
        path.write_text(text)
        return load(path, flags.split(), environ)

    return load_text


def mistakes(loading: Loader, text: str = GOOD, flags: str = "", **environ: str) -> str:
    with pytest.raises(ConfigError) as error:
        loading(text, flags, **environ)
    return str(error.value)


def test_the_stronger_source_wins_and_is_named(loading: Loader) -> None:
    loaded = loading(GOOD, "--task.size 50", ASYNCRL_TASK__SIZE="40", ASYNCRL_TASK__PROMPTS_PER_STEP="4")
    task = loaded.config.task
    assert (task.size, task.prompts_per_step, task.samples_per_prompt) == (50, 4, 8)
    assert loaded.sources["task.size"] == "--task.size"
    assert loaded.sources["task.prompts_per_step"] == "environment variable ASYNCRL_TASK__PROMPTS_PER_STEP"
    assert loaded.sources["model.name"].endswith("mine.toml:2")
    assert "task.samples_per_prompt" not in loaded.sources


def test_the_name_is_the_files_unless_it_is_given(loading: Loader) -> None:
    assert loading().config.name == "mine"
    assert loading('name = "other"\n' + GOOD).config.name == "other"


def test_values_of_every_kind_from_flags(loading: Loader) -> None:
    flags = (
        "--seed=-3 --steps 7 --training.learning-rate 3e-4 --generation.deterministic --training.gradient_checkpointing"
        " false --generation.stop a --generation.stop b --training.betas [0.8,0.9] --staleness.cut_at never"
        " --telemetry.samples_per_step all --reward.functions f.py:reward --algorithm.weight_cap none"
    )
    config = loading(GOOD, flags).config
    assert (config.seed, config.steps, config.training.learning_rate) == (-3, 7, 3e-4)
    assert config.generation.deterministic
    assert not config.training.gradient_checkpointing
    assert config.generation.stop == ("a", "b")
    assert config.training.betas == (0.8, 0.9)
    assert config.staleness.cut_at == "never"
    assert config.telemetry.samples_per_step == "all"
    assert config.reward.functions[0].use == f"{Path.cwd()}/f.py:reward"
    assert config.algorithm.weight_cap is None


def test_entries_of_a_table_from_flags_and_variables(loading: Loader) -> None:
    text = GOOD + "[environment]\noptions = { withhold = true, cost = { a = 1, b = 2 } }\n"
    flags = "--environment.options.cost.b=0.5 --environment.options.day 2026-11-23 --task.options={terms=3}"
    loaded = loading(text, flags, ASYNCRL_ENVIRONMENT__OPTIONS__name='"x y"')
    day = {"day": "2026-11-23"}
    expected = {"withhold": True, "cost": {"a": 1, "b": 0.5}, "name": "x y", **day}
    assert loaded.config.environment.options == expected
    assert loaded.config.task.options == {"terms": 3}
    assert loaded.sources["environment.options"] == "--environment.options.day"
    whole = loading(text, "--environment.options {x=1} --environment.options.y false").config.environment.options
    assert whole == {"x": 1, "y": False}
    whole = loading(text, "--environment.options.y false --environment.options {x=1}").config.environment.options
    assert whole == {"x": 1}


def test_what_stands_behind_the_key_of_a_table_stays_as_it_was_written(loading: Loader) -> None:
    flags = "--environment.options.variables.MY-VAR=1 --environment.options.max-turns 2 --training.learning-rate 1e-4"
    loaded = loading(GOOD, flags, ASYNCRL_ENVIRONMENT__OPTIONS__variables__HTTP_PROXY="p", ASYNCRL_STEPS="9")
    expected = {"variables": {"MY-VAR": 1, "HTTP_PROXY": Secret("p")}, "max-turns": 2}
    assert loaded.config.environment.options == expected
    assert (loaded.config.training.learning_rate, loaded.config.steps) == (1e-4, 9)
    assert loading(GOOD, "--task.options.A-B.c-d 1").config.task.options == {"A-B": {"c-d": 1}}


def test_a_number_reaches_a_union_as_a_number(loading: Loader) -> None:
    assert loading(GOOD, "--staleness.cut_at 3").config.staleness.cut_at == 3


@pytest.mark.parametrize(
    ("flags", "key", "value"),
    [
        ("--algorithm.correction none", "correction", "none"),
        ("--algorithm.preset gspo --algorithm.correction none", "correction", "none"),
        ("--algorithm.divisor none", "divisor", None),
        ("--algorithm.gate_temperatures none", "gate_temperatures", None),
        ("--algorithm.loss sapo --algorithm.gate_temperatures [1,2.5]", "gate_temperatures", (1.0, 2.5)),
        (
            "--algorithm.loss sapo --algorithm.gate_temperatures 1 --algorithm.gate_temperatures 2.5",
            "gate_temperatures",
            (1.0, 2.5),
        ),
    ],
)
def test_none_is_a_choice_or_no_value_and_lists_may_be_absent(
    flags: str, key: str, value: object, loading: Loader
) -> None:
    assert getattr(loading(GOOD, flags).config.algorithm, key) == value


def test_text_stays_as_it_was_typed(loading: Loader) -> None:
    assert loading(GOOD, "--task.prompts [x].jsonl --model.name none").config.model.name == "none"


def test_every_mistake_of_every_source_is_reported_at_once(loading: Loader) -> None:
    text = """\
stpes = 3
[task]
prompts = "p.jsonl"
size = "many"
[algorithm]
kl = 0.1
kl_estimator = "k1"
[rewards]
deadline = 3
"""
    said = mistakes(loading, text, "--num_generations 4 --staleness.limit -1 --steps", ASYNCRL_TASK__SIZ="3")
    for expected in (
        "9 mistakes",
        "mine.toml:1: stpes: there is no such key; did you mean steps?",
        "mine.toml:4: task.size: must be a valid integer, not 'many'",
        "mine.toml:9: rewards.deadline: there is no such key; did you mean reward.deadline?",
        "ASYNCRL_TASK__SIZ: task.siz: there is no such key; did you mean ASYNCRL_TASK__SIZE?",
        "--num_generations: there is no such key; write task.samples_per_prompt",
        "--staleness.limit: must be greater than or equal to 0, not '-1'",
        "--steps: needs a value: int > 0",
        "k1 as a loss has zero expected gradient",
        "mine.toml:7",
        "model.name: has no default",
    ):
        assert expected in said
    assert said.count("\n") == 9


def test_a_wrong_value_is_reported_also_where_a_stronger_source_hides_it(loading: Loader) -> None:
    assert "mine.toml:6: task.size" in mistakes(loading, GOOD.replace("30", '"many"'), "--task.size 40")


def test_a_flag_may_repair_what_the_file_contradicts(loading: Loader) -> None:
    text = GOOD + "[algorithm]\nweight_cap = 2.0\n"
    assert "twice" in mistakes(loading, text)
    assert loading(text, "--algorithm.old_logprobs recomputed").config.algorithm.weight_cap == 2.0


def test_a_contradiction_about_a_broken_key_waits(loading: Loader) -> None:
    said = mistakes(loading, GOOD + '[algorithm]\nweight_cap = 2.0\nold_logprobs = "engin"\n')
    golden.says(said, "mean engine?")
    assert "\n" not in said


SETS = '[evaluate.sets.hard]\nprompts = "h.jsonl"\nsize = 3\n'


@pytest.mark.parametrize("flags", golden.cases(__file__, "test_mistakes_in_flags"), ids=str)
def test_mistakes_in_flags(loading: Loader, flags: str) -> None:
    golden.says(mistakes(loading, GOOD + SETS, flags))


def test_a_file_that_is_no_toml(loading: Loader) -> None:
    golden.says(mistakes(loading, "steps = = 3"), "TOML")
    with golden.raises(ConfigError, match=r"gone\.toml"):
        load("gone.toml", environ={})


@pytest.mark.parametrize("text", ["[model]\nname = \n", '[task]\nprompts = "p.jsonl'])
def test_broken_syntax_is_one_mistake_with_its_place(text: str, loading: Loader) -> None:
    said = mistakes(loading, text)
    golden.says(said)
    assert "\n" not in said


def test_broken_syntax_hides_no_mistake_that_stands_elsewhere(loading: Loader) -> None:
    assert mistakes(loading, "[model", "--task.siz 3").startswith("2 mistakes")


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_bytes(b'name = "\xff"')
    with golden.raises(ConfigError, match="UTF-8.*byte 8"):
        load(tmp_path / "mine.toml", environ={})


@pytest.mark.parametrize("target", golden.cases(__file__, "test_an_unknown_target"), ids=str)
def test_an_unknown_target(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The closest experiment and file are named."""
    (tmp_path / "sub").mkdir()
    for name in ("my-file.toml", "smolm.toml", "z.toml", "sub/mime.toml", "sub/notes.txt"):
        (tmp_path / name).write_text(GOOD)
    monkeypatch.chdir(tmp_path)
    with golden.raises(ConfigError):
        load(target, environ={})


@pytest.mark.parametrize("name", golden.cases(__file__, "test_a_misspelled_variable"), ids=str)
def test_a_misspelled_variable(name: str, loading: Loader) -> None:
    golden.says(mistakes(loading, GOOD, "", **{name: "3"}), f"environment variable {name}: ")


def test_an_unknown_experiment_names_the_closest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "quickstart.toml").write_text("# Learns to count.\n" + GOOD)
    monkeypatch.setattr("asyncrl.experiments.files", lambda _: tmp_path)
    assert experiments() == {"quickstart": "Learns to count."}
    assert load("quickstart", environ={}).config.name == "quickstart"
    with golden.raises(ConfigError, match="mean quickstart"):
        load("quikstart", environ={})


def test_values_from_python_are_strongest(loading: Loader, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(GOOD)
    loaded = load(tmp_path / "mine.toml", ["--task.size", "5"], {}, {"task": {"size": 9}, "training.updates": 2})
    assert (loaded.config.task.size, loaded.config.training.updates) == (9, 2)
    with pytest.raises(ConfigError, match=r"argument: task.num_generations.*task.samples_per_prompt"):
        load(tmp_path / "mine.toml", (), {}, {"task.num_generations": 3})


@pytest.mark.parametrize("name", sorted(experiments()))
def test_every_experiment_is_valid_and_says_what_it_shows(name: str) -> None:
    assert load(name, environ={}).config.name == name
    assert experiments()[name]


def test_a_flag_gives_one_entry_of_a_table_that_the_file_has(loading: Loader) -> None:
    hard = loading(GOOD + SETS, "--evaluate.sets.hard.every 20").config.evaluate.sets["hard"]
    assert (Path(hard.prompts).name, hard.size, hard.every) == ("h.jsonl", 3, 20)
    hard = loading(GOOD + SETS, ASYNCRL_EVALUATE__SETS__hard__size="4").config.evaluate.sets["hard"]
    assert (Path(hard.prompts).name, hard.size) == ("h.jsonl", 4)
