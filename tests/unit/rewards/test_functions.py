import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import Config, ModelConfig, RewardConfig, TaskConfig
from asyncrl.errors import ConfigError
from asyncrl.rewards import Sample
from asyncrl.rewards.functions import FunctionSpec, function_problems, function_specs, load, overlapping
from tests import golden

SAMPLE = Sample("p", "abc", {"prompt": "p", "answer": "abc", "data_source": "d", "reward_model": {}}, 0, 0, "stop", 1)

MINE = """
def right(sample, factor=1.0):
    return factor * float(sample.text == sample.row["answer"])

async def slowly(sample):
    return 1.0

class Judge:
    async def __call__(self, sample):
        return 1.0

judge = Judge()

def trl_like(completions, factor=1.0, **columns):
    return [factor * len(text) for text in completions]

def trl_trainers_own(completions, environments):
    return [1.0]

def verl_like(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    return len(solution_str) + bonus

number = 3
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    return str(file)


def spec(use: str, **rest: Any) -> FunctionSpec:
    return FunctionSpec(use, "name", **rest)


def config_of(*functions: Any) -> Config:
    return Config(
        model=ModelConfig(name="m"), task=TaskConfig(prompts="p.jsonl"), reward=RewardConfig(functions=functions)
    )


def test_specs_of_a_config() -> None:
    specs = function_specs(config_of("exact_match", {"use": "my.py:f", "weight": 2, "group": True}))
    assert [(each.name, each.weight, each.group) for each in specs] == [("exact_match", 1.0, False), ("f", 2.0, True)]
    assert FunctionSpec(**asdict(specs[1])) == specs[1]


def test_no_functions_and_equal_names_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"reward\.functions is empty"):
        function_specs(config_of())
    with golden.raises(ValueError, match="'f'.*`name`"):
        config_of("a.py:f", "b.py:f")


def test_overlong_answers_get_a_reward_term_of_their_own() -> None:
    values = {"model": {"name": "m"}, "task": {"prompts": "p"}, "generation": {"max_new_tokens": 50}}
    functions = {"reward": {"functions": ["exact_match"]}}
    specs = function_specs(Config.model_validate({**values, **functions, "algorithm": {"overlong": 0.2}}))
    assert [each.name for each in specs] == ["exact_match", "overlong"]
    punishment = load(specs[1])
    assert [punishment(replace(SAMPLE, tokens=tokens)) for tokens in (1, 40, 45, 50)] == [0, 0, -0.5, -1]
    assert len(function_specs(Config.model_validate({**values, **functions}))) == 1


@pytest.mark.parametrize(
    ("tokens", "given", "finish", "punished"),
    [
        (40, 60, "token_limit", -1.0),
        (40, 45, "token_limit", -1.0),  # The next observation had no room.
        (40, 40, "stop", 0.0),
        (1, 89, "turn_limit", -0.5),
        (90, 0, "stop", -0.5),
        (50, 0, "stop", 0.0),
    ],
)
def test_overlong_episodes_are_measured_with_the_tokens_that_they_were_given(
    tokens: int, given: int, finish: str, punished: float
) -> None:
    values = {"model": {"name": "m"}, "task": {"prompts": "p"}, "generation": {"max_new_tokens": 50}}
    environment = {"use": "my.py:Game", "max_tokens": 100}
    config = Config.model_validate({**values, "environment": environment, "algorithm": {"overlong": 0.2}})
    punishment = load(function_specs(config)[-1])
    assert punishment(replace(SAMPLE, tokens=tokens, given=given, finish=finish)) == punished


def test_the_punishment_of_overlong_answers_is_no_cost() -> None:
    values = {"model": {"name": "m"}, "task": {"prompts": "p"}, "reward": {"functions": ["exact_match"]}}
    algorithm = {"preset": "safe_rlhf", "overlong": 0.2}
    config = Config.model_validate({**values, "algorithm": algorithm, "cost": {"functions": ["length"], "limit": 1.0}})
    assert [each.name for each in function_specs(config, "cost")] == ["length"]
    assert [each.name for each in function_specs(config, "reward")] == ["exact_match", "overlong"]


@pytest.mark.parametrize(
    ("use", "rest", "said"),
    [
        ("exact_mach", {}, "no template exact_mach; did you mean exact_match"),
        ("exact_match", {"options": {"colum": "x"}}, "exact_match has no option colum; did you mean column"),
        ("exact_match", {"group": True}, "remove group = true"),
        ("regex_format", {}, "needs the option pattern"),
        ("regex_format", {"options": {"pattern": "("}}, "regex_format: '.' is no regular expression"),
        ("nowhere.py:f", {}, "there is no file"),
        ("no_such_module_anywhere:f", {}, "there is no module no_such_module_anywhere"),
        ("asyncrl.tasks.builtin.reverse:trainin", {}, "has no trainin; did you mean training"),
        ("asyncrl.tasks.builtin.reverse:HABITS", {}, "is not a function"),
    ],
)
def test_mistakes(use: str, rest: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(spec(use, **rest))


def test_mistakes_that_are_known_before_any_code_runs(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("raise SystemExit('this file was run')\ndef right(sample): ...\n")
    functions: list[Any] = [
        "exact_match",
        f"{file}:right",
        f"trl:{file}:rihgt",
        "exact_mach",
        {"use": "length", "options": {"maximum": 10, "slak": 2}},
        {"use": "regex_format", "options": {"pattern": 3}},
    ]
    assert list(map(str, function_problems(config_of(*functions)))) == [
        f"reward.functions: {file} has no rihgt; did you mean right?",
        "reward.functions: there is no template exact_mach; did you mean exact_match? "
        "A function of your own is written FILE.py:NAME.",
        "reward.functions: length has no option slak; did you mean slack?",
        "reward.functions: regex_format: first argument must be string or compiled pattern",
    ]


def test_a_function_of_a_file_with_options(mine: str) -> None:
    assert load(spec(f"{mine}:right"))(SAMPLE) == 1
    assert load(spec(f"{mine}:right", options={"factor": 3.0}))(SAMPLE) == 3
    with golden.raises(ConfigError, match="mean factor"):
        load(spec(f"{mine}:right", options={"facter": 3.0}))


def test_functions_for_other_libraries(mine: str) -> None:
    assert load(spec(f"trl:{mine}:trl_like"))(SAMPLE) == 3
    assert load(spec(f"trl:{mine}:trl_like", options={"factor": 2.0}))(SAMPLE) == 6
    with pytest.raises(ConfigError, match=r"^reward\.functions: trl:.*mine\.py:trl_trainers_own: .* environments"):
        load(spec(f"trl:{mine}:trl_trainers_own"))
    assert load(spec(f"verl:{mine}:verl_like"))(SAMPLE) == 3
    assert load(spec(f"verl:{mine}:verl_like", options={"bonus": 1.0}))(SAMPLE) == 4


def test_which_functions_overlap(mine: str) -> None:
    assert overlapping(load(spec(f"{mine}:slowly")))
    assert overlapping(load(spec(f"{mine}:judge")))
    assert not overlapping(load(spec(f"{mine}:right")))
    assert not overlapping(load(spec("exact_match")))


SIGNATURES = """
def zero(): ...
def two(sample, x): ...
def keyword(sample, *, strict): ...
def optional(sample, x=1, *more, strict=False, **rest): ...
def anything(*samples): ...
class Judge:
    def __call__(self, sample): ...
if len("made while it runs"):
    def other(): ...
else:
    def other(sample): ...
"""


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("zero", {}, r"not as zero\(\): it takes no argument|not as zero\(\): too many positional"),
        ("two", {}, r"not as two\(sample, x\): (nothing is given for x|missing a required argument: 'x')"),
        ("keyword", {}, r"(nothing is given for strict|missing a required .*argument: 'strict')"),
    ],
)
def test_functions_that_cannot_be_called_with_a_sample(
    tmp_path: Path, name: str, options: dict[str, Any], said: str
) -> None:
    (tmp_path / "signatures.py").write_text(SIGNATURES)
    use = f"{tmp_path}/signatures.py:{name}"
    (problem,) = function_problems(config_of({"use": use, "options": options}))
    assert re.search(said, problem.text)
    with pytest.raises(ConfigError, match=f"one argument, the sample .*{said}"):
        load(spec(use, options=options))


@pytest.mark.parametrize(
    ("name", "options"),
    [("two", {"x": 1}), ("keyword", {"strict": 1}), ("optional", {}), ("anything", {}), ("other", {})],
)
def test_functions_that_may_be_called_with_a_sample(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    (tmp_path / "signatures.py").write_text(SIGNATURES)
    assert function_problems(config_of({"use": f"{tmp_path}/signatures.py:{name}", "options": options})) == []
