"""Mistakes of a new user, on the command line, in files and in calls from Python: each is answered in a line or two
before workers start, by `asyncrl doctor` as by `asyncrl run`."""

import json
import shlex
import shutil
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import asyncrl
from asyncrl.config.install_hints import program
from asyncrl.config.sources import load
from asyncrl.deploy import cli, run_setup
from asyncrl.deploy.checks.machine import Check
from asyncrl.deploy.commands import doctor
from asyncrl.deploy.preflight import preflight
from asyncrl.deploy.process import fork_client
from asyncrl.errors import AsyncrlError
from tests import golden
from tests.unit.letter_model import write_letter_model

BASE = """\
[model]
name = "model"
[task]
prompts = "rows.jsonl"
[reward]
functions = ["exact_match"]
"""
"""The experiment of a new user, which would run."""
REWARD = "def reward(sample):\n    return 1.0\n"
ROWS = [{"prompt": "ab", "answer": "a"}, {"prompt": "cd", "answer": "a"}]
RUN = "run mine.toml"
OF_THE_COMMAND = ("--run-dir", "--listen", "--on", "--address", "--restarts", "--accept-changes", "--print-config")
"""Flags that only `run` has."""
LONGEST_LINE = 480
ABSENT = ("bitsandbytes", "gguf", "accelerate", "gymnasium", "math_verify", "datasets")
"""Modules of extras that these tests take for missing."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """name: of the test. typed: behind `asyncrl`. toml: text of mine.toml. files: further files, by name; a text of
    None removes the file. environ: variables."""

    name: str
    typed: str
    toml: str = BASE
    files: Mapping[str, str | bytes | None] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)


Answered = Callable[[Mistake], None]


def each(*mistakes: Mistake) -> pytest.MarkDecorator:
    """Parametrises a test by mistakes."""
    return pytest.mark.parametrize("mistake", [pytest.param(one, id=one.name) for one in mistakes])


def beside(text: str) -> str:
    """Returns the experiment with further lines."""
    return BASE + text


def scored_by(functions: str) -> str:
    """Returns the experiment with other reward functions."""
    return BASE.replace('["exact_match"]', functions)


def reward(name: str, text: str, library: str = "") -> Mistake:
    """Returns the mistake of a reward function in a file of its own, which may be written for another library."""
    return Mistake(name, RUN, scored_by(f'["{library}bad.py:score"]'), {"bad.py": text})


LETTERS = {
    "model_type": "llama",
    "vocab_size": 11,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
CRITIC = {"model/config.json": json.dumps({**LETTERS, "architectures": ["LlamaForTokenClassification"]})}
HELD_OUT = beside('[evaluate]\nprompts = "rows.jsonl"\n')
JOINED = f"{RUN} --fleet.joined.generation 1 --fleet.wire tcp --fleet.listen tcp:"
RESET = "    def reset(self, row, seed): ...\n"
METHODS = f"{RESET}    async def step(self, message: 'str', sampled=None): return await of_nothing\n"


def of_class(name: str, body: str, options: str = "{}") -> Mistake:
    """Returns the mistake of the class of an environment."""
    toml = beside(f'[environment]\nuse = "bad.py:Mine"\noptions = {options}\n')
    return Mistake(f"class-{name}", RUN, toml, {"bad.py": f"class Mine:\n    SIZE = 3\n{body}\n"})


@pytest.fixture(scope="module")
def letter_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("letters") / "model"
    write_letter_model(folder)
    return folder


@pytest.fixture
def workplace(tmp_path: Path, letter_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: an experiment, its model and rows, and an ended run. A run that would start workers fails the
    test."""

    def started(*_: object) -> None:
        pytest.fail("the mistake was not found before the workers start")

    shutil.copytree(letter_model, tmp_path / "model")
    (tmp_path / "runs" / "mine-2").mkdir(parents=True)
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    for name, text in {
        "mine.toml": BASE,
        "rows.jsonl": lines,
        "mine.py": REWARD,
        "runs/mine-2/config.toml": "",
    }.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_setup, "run_fleet", started)
    monkeypatch.setattr(run_setup, "forks_of", lambda *_: nullcontext())
    monkeypatch.setattr(fork_client, "forks_of", lambda *_: nullcontext())
    monkeypatch.setattr(fork_client, "early_forks", nullcontext)
    monkeypatch.setattr("asyncrl.deploy.preflight.try_containment", lambda *layers: None)
    monkeypatch.setattr(doctor, "machine_checks", list)
    monkeypatch.setattr(doctor, "fork_check", lambda: Check("forked workers", "ok", ""))
    return tmp_path


@pytest.fixture
def answered(workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Answered:
    """answered(mistake): what is printed is short, without a traceback and as recorded; the command leaves no files."""

    def printed(typed: str) -> tuple[int, str]:
        code = cli.main(shlex.split(typed))
        shown = capsys.readouterr()
        return code, (shown.out + shown.err).replace(f"{program()} ", "asyncrl ")

    def answer(mistake: Mistake) -> None:
        for name, content in {"mine.toml": mistake.toml, **mistake.files}.items():
            path = workplace / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if content is None:
                path.unlink()
            else:
                path.write_bytes(content if isinstance(content, bytes) else content.encode())
        for name, value in mistake.environ.items():
            monkeypatch.setenv(name, value)
        before = sorted(workplace.rglob("*"))
        code, text = printed(mistake.typed)
        assert (code, text.startswith("asyncrl: "), "Traceback" in text) == (2, True, False), text
        assert max(map(len, text.splitlines())) <= LONGEST_LINE
        assert [path for path in sorted(workplace.rglob("*")) if "__pycache__" not in path.parts] == before
        golden.says(text)
        if mistake.typed.startswith(RUN) and not any(flag in mistake.typed for flag in OF_THE_COMMAND):
            code, checked = printed(mistake.typed.replace("run", "doctor", 1))
            assert code in (1, 2), checked
            for line in text.removeprefix("asyncrl: ").splitlines():
                assert line.endswith(":") or " ".join(line.split()) in " ".join(checked.split()), checked

    return answer


@pytest.mark.parametrize("typed", golden.cases(__file__, "test_what_is_typed"), ids=str)
def test_what_is_typed(typed: str, answered: Answered) -> None:
    """Words that are no command, flags, arguments, and directories that hold no run; the cases stand in the file of
    messages."""
    answered(Mistake(typed, typed))


@each(
    Mistake("variable", RUN, environ={"ASYNCRL_STEP": "3"}),
    Mistake("value-of-variable", RUN, environ={"ASYNCRL_STEPS": "many"}),
)
def test_flags_of_a_run(mistake: Mistake, answered: Answered) -> None:
    answered(mistake)


@each(
    Mistake("config-gone", "run --run-dir lost", files={"lost/journal": ""}),
)
def test_directories_that_hold_no_run(mistake: Mistake, answered: Answered) -> None:
    answered(mistake)


@each(
    Mistake("unquoted", RUN, BASE.replace('"model"', "model")),
    Mistake("unquoted-path", RUN, BASE.replace('"rows.jsonl"', "./rows.jsonl")),
    Mistake("curly-quotes", RUN, BASE.replace('"rows.jsonl"', "“rows.jsonl”")),
    Mistake("open-quote", RUN, BASE.replace('"model"', '"model')),
    Mistake("colon", RUN, BASE.replace("name =", "name:")),
    Mistake("two-equals", RUN, BASE.replace("name =", "name ==")),
    Mistake("no-value", RUN, BASE.replace(' "model"', "")),
    Mistake("python-none", RUN, beside("[algorithm]\nweight_cap = None\n")),
    Mistake("json-null", RUN, beside("[algorithm]\nweight_cap = null # off\n")),
    Mistake("python-true", RUN, beside("[telemetry]\ntrace = True\n")),
    Mistake("decimal-comma", RUN, beside("[training]\nlearning_rate = 0,001\n")),
    Mistake("bare-point", RUN, beside("[training]\nlearning_rate = 1.e-6\n")),
    Mistake("slashes-comment", RUN, beside("// a comment\n")),
    Mistake("open-bracket", RUN, beside("[training\n")),
    Mistake("section-twice", RUN, beside("[task]\nsize = 3\n")),
    Mistake("key-twice", RUN, beside("on_error = 1\non_error = 2\n")),
    Mistake("windows-path", RUN, BASE.replace('"rows.jsonl"', '"C:\\Users\\me\\rows.jsonl"')),
    Mistake("json-text", RUN, '{"model": {"name": "model"}}'),
    Mistake("utf-16", RUN, "", {"mine.toml": b"\xff\xfe["}),
)
def test_files_that_are_no_toml(mistake: Mistake, answered: Answered) -> None:
    answered(mistake)


@each(
    Mistake("yaml", "run mine.yaml", files={"mine.yaml": "a: 1"}),
    Mistake("json", "run mine.json", files={"mine.json": "{}"}),
    Mistake("circle", RUN, 'extends = "mine.toml"\n' + BASE),
    Mistake("base-gone", RUN, 'extends = "base.toml"\n' + BASE),
    Mistake("base-typo", RUN, 'extends = "quikstart"\n' + BASE),
    Mistake("base-table", RUN, "extends = {a = 1}\n" + BASE),
    Mistake("include", RUN, 'include = "base.toml"\n' + BASE),
    Mistake("empty", RUN, ""),
)
def test_files_that_are_no_experiment(mistake: Mistake, answered: Answered) -> None:
    answered(mistake)


@each(
    Mistake("key-below-a-section", RUN, beside("steps = 3\n")),
    Mistake("key-above-sections", RUN, "learning_rate = 1e-5\n" + BASE),
    Mistake("model-is-text", RUN, 'model = "model"\n[task]\nprompts = "rows.jsonl"\n'),
    Mistake("reward-is-text", RUN, 'reward = "exact_match"\n' + BASE.partition("[reward]")[0]),
    Mistake("no-list", RUN, scored_by('"exact_match"')),
    Mistake(
        "single-bracket", RUN, BASE.replace("[reward]\nfunctions = [", '[reward.functions]\nuse = "exact_match"\n#')
    ),
    Mistake("optimizer-section", RUN, beside("[optimizer]\nname = 'adam'\nlr = 3e-4\n")),
    Mistake("trainer-section", RUN, beside("[trainer]\nlearning_rate = 1e-5\n")),
    Mistake("max-tokens", RUN, beside("[generation]\nmax_tokens = 100\n")),
    Mistake("reward-weights", RUN, beside("weights = [0.5, 0.5]\n")),
    Mistake("lora-r", RUN, BASE.replace("[task]", "lora = { r = 8 }\n[task]")),
    Mistake("lora-true", RUN, BASE.replace("[task]", "lora = true\n[task]")),
    Mistake("function-key", RUN, scored_by('[{ function = "mine.py:reward" }]')),
    Mistake("bare-option", RUN, scored_by('[{ use = "exact_match", column = "answer" }]')),
    Mistake("stop-number", RUN, beside("[generation]\nstop = 3\n")),
    Mistake("fraction-of-steps", RUN, "steps = 1.5\n" + BASE),
    Mistake("another-program", RUN, "".join(f"[a{i}]\nb{i} = 1\n" for i in range(30)) + BASE),
)
def test_wrong_keys_and_values(mistake: Mistake, answered: Answered) -> None:
    answered(mistake)


@each(
    reward("syntax", "def score(sample)\n    return 1\n"),
    reward("import", "import numpyy\ndef score(sample): return 1\n"),
    reward("two-arguments", "def score(prompt, completion): return 1\n"),
    reward("no-argument", "def score(): return 1\n"),
    reward("async", "async def score(prompt, completion): return 1\n"),
    reward("lambda", "score = lambda prompt, completion: 1.0\n"),
    reward("class", "class score:\n    def __call__(self, sample): return 1\n"),
    reward("number", "score = 0.5\n"),
    reward("trl", "def score(completions, **kwargs): return [1.0]\n"),
    reward("verl", "def score(data_source, solution_str, ground_truth): return 1\n"),
    reward("trl-environments", "def score(prompts, completions, environments): return [1.0]\n", "trl:"),
    reward("trl-column", "def score(completions, label, answer): return [1.0]\n", "trl:"),
    reward("trl-named", "def score(completions, *, label, **others): return [1.0]\n", "trl:"),
    reward("verl-column", "def score(data_source, solution_str, ground_truth, extra_info): return [1.0]\n", "verl:"),
    reward("trl-by-place", "def score(prompts, completions, /): return [1.0]\n", "trl:"),
    reward("trl-single", "def score(prompt, completions): return [1.0]\n", "trl:"),
    reward("verl-without-information", "def score(data_source, solution_str, ground_truth): return 1.0\n", "verl:"),
    reward(
        "verl-with-more",
        "def score(data_source, solution_str, ground_truth, extra_info, tokenizer): return 1.0\n",
        "verl:",
    ),
    reward("verl-renamed", "async def score(source, text, truth, info): return 1.0\n", "verl:"),
    reward("other-name", "def scores(sample): return 1\n"),
    Mistake("file-only", RUN, scored_by('["mine.py"]')),
    Mistake("dotted", RUN, scored_by('["mine.reward"]')),
    Mistake("called", RUN, scored_by('["mine.py:reward()"]')),
    Mistake("notebook", RUN, scored_by('["book.ipynb:reward"]')),
    Mistake("file-gone", RUN, scored_by('["rewards.py:reward"]')),
    Mistake("template", RUN, scored_by('["exact_mtach"]')),
    Mistake("option", RUN, scored_by('[{ use = "exact_match", options = { colum = "a" } }]')),
    Mistake("option-missing", RUN, scored_by('["judge"]')),
    Mistake("twice", RUN, scored_by('["exact_match", "exact_match"]')),
    Mistake("weight", RUN, scored_by('[{ use = "exact_match", weight = "half" }]')),
    Mistake("none", RUN, scored_by("[]")),
)
def test_reward_functions(mistake: Mistake, answered: Answered) -> None:
    answered(mistake)


@each(
    Mistake("reward-file", RUN, files={"rows.jsonl": '{"question": "a"}\n'}),
    Mistake("no-tokenizer", RUN, files={"model/tokenizer.json": None, "model/tokenizer_config.json": None}),
    Mistake("no-weights", RUN, files={"model/model.safetensors": None}),
    Mistake("no-type", RUN, files={"model/config.json": "{}"}),
    Mistake("broken-config", RUN, files={"model/config.json": "{"}),
    Mistake("encoder", RUN, files={"model/config.json": json.dumps({"model_type": "bert"})}),
    Mistake("critic", RUN, files=CRITIC),
    Mistake("evaluated-critic", "evaluate model --task mine.toml", HELD_OUT, files=CRITIC),
    Mistake("run-as-model", f"{RUN} --model.name runs/x", files={"runs/x/checkpoints/1": ""}),
    Mistake("reward-model", RUN, BASE.replace('functions = ["exact_match"]', 'model = "nofolder"')),
    Mistake("lora-target", RUN, BASE.replace("[task]", 'lora = { targets = ["query"] }\n[task]')),
)
def test_prompts_and_models(mistake: Mistake, answered: Answered) -> None:
    answered(mistake)


@each(
    Mistake("layout-types", RUN, beside('[training]\nlayout = { dp = true, shard = "2", tp = 0 }\n')),
    of_class("no-step", "    def reset(self, row, seed): ..."),
    of_class("no-reset", "    def step(self, message): ..."),
    of_class("step-alone", f"{RESET}    def step(self): ..."),
    of_class("options", METHODS, options="{size = 3}"),
    of_class("other-option", f"{METHODS}    def __init__(self, size=1): ...", options="{sise = 3}"),
    of_class("needed-option", f"{METHODS}    def __init__(self, size): ..."),
)
def test_devices_and_keys_that_contradict(mistake: Mistake, answered: Answered) -> None:
    answered(mistake)


@each(
    Mistake("8-bit", f"{RUN} --training.optimizer adamw8bit"),
    Mistake("gymnasium", "run cartpole"),
    Mistake("gguf", f"{RUN} --model.name pypi:smollm2"),
    Mistake("math", RUN, scored_by('["math_verify"]')),
    Mistake("hub", f"{RUN} --task.prompts hub:openai/gsm8k#train"),
)
def test_missing_packages_name_the_command_that_installs_them(
    mistake: Mistake, answered: Answered, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.config.install_hints.find_spec", lambda name: None if name in ABSENT else name)
    answered(mistake)


@pytest.mark.parametrize(
    "flag",
    [
        "--acting.environments 16",
        "--critic.learning_rate 1e-5",
        "--reference.device cuda",
        "--reference.layout.shard 2",
    ],
)
def test_keys_that_nothing_reads_are_a_note(flag: str, workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loaded = load("mine.toml", flag.split(), {})
    (problem,) = preflight(loaded.config, places=loaded.sources)
    assert (problem.is_warning, problem.where) == (True, flag.split()[0])
    golden.says(problem)
    assert cli.main(["doctor", "mine.toml", *flag.split()]) == 0
    assert f"note  config              {problem}" in capsys.readouterr().out


# Calls from Python: a notebook shows one line, without a traceback.


def refused(call: Callable[[], object]) -> None:
    """Holds the line that a notebook shows of the error of a call."""
    with pytest.raises(AsyncrlError) as error:
        call()
    (line,) = error.value._render_traceback_()
    assert len(line) <= LONGEST_LINE
    golden.says(line)


@pytest.mark.parametrize(
    "arguments",
    [
        {"model": None},
        {"model": Path("/nowhere/modle")},
        {"prompts": None},
        {"prompts": "row.jsonl"},
        {"prompts": ["hello"]},
        {"prompts": {"prompt": ["a"]}},
        {"prompts": []},
        {"prompts": [{"question": "a"}]},
        {"reward": None},
        {"reward": 1.0},
        {"reward": []},
        {"reward": [None]},
        {"reward": {"function": "exact_match"}},
        {"reward": "exact_mtach"},
        {"reward": lambda prompt, completion: 1.0},
        {"reward": lambda completions, **kwargs: [1.0]},
        {"reward": type("Local", (), {})},
        {"reward": {"functions": [{"use": lambda s: 1.0, "wieght": 2}]}},
        {"algorithm": "gpro"},
        {"algorithm": 3},
        {"steps": 0},
        {"staleness": 1.5},
        {"traning": {"learning_rate": 1e-05}},
        {"learning_rate": 1e-05},
        {"training": 1e-05},
        {"num_generations": 8},
        {"run_dir": "rows.jsonl"},
        {"run_dir": "model"},
        {"on_step": "stop"},
        {"environment": 3},
        {"environment": type("Game", (), {})},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_arguments_of_train(arguments: dict[str, Any], workplace: Path) -> None:
    given = {"model": "model", "prompts": ROWS, "reward": "exact_match", **arguments}
    refused(lambda: asyncrl.train(**given))


@pytest.mark.parametrize(
    "given",
    [
        "CartPole-v1",
        {},
        {"env": "CartPole-v1", "algoritm": "PPO"},
        {"env": "CartPole-v1", "algorithm": "DQN"},
        {"env": "CartPole-v1", "lr": 0.001},
        {"env": "CartPole-v1", "num_workers": 2},
        {"env": "CartPole-v1", "zzz": 2},
        {"env": "CartPole-v1", "policy": "MlpPolicy"},
        {"env": "CartPole-v1", "policy": {"hidden": [64]}},
        {"env": "CartPole-v1", "policy": {"hidden_size": 64}},
        {"env": "CartPole-v1", "distributed": {"placement_strategy": "pakc"}},
        {"env": "CartPole-v1", "distributed": {"num_workers": 0}},
        {"env": "CartPole-v1", "gamma": 1.5},
        {"env": object()},
    ],
)
def test_keys_of_the_trainer(given: Any) -> None:
    refused(lambda: asyncrl.RLTrainer(given))
