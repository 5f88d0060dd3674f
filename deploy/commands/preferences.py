"""`asyncrl preferences fit` fits a reward model to what people said in runs with live feedback."""

import argparse
import json
import shutil
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from asyncrl.config.install_hints import program
from asyncrl.config.sections.training_config import rate_mistake
from asyncrl.config.sources import read
from asyncrl.deploy.commands.command_parser import CommandParser
from asyncrl.errors import ConfigError
from asyncrl.rewards.feedback.pairs import ComparedPrompt, compared_prompts, lacks_tokens, split, values_of_line
from asyncrl.telemetry.jsonl import read_lines
from asyncrl.telemetry.run_directory import RunDirectory

FEWEST_PAIRS = 20
FEWEST_PROMPTS = 5
"""With fewer decided pairs, or pairs of fewer prompts, the held-out accuracy would say nothing."""
HELD_OUT = 0.2
"""Share of the prompts that the model is tested on and not trained on."""


def main(arguments: list[str]) -> int:
    parser = CommandParser("asyncrl preferences", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="fit")
    fit = commands.add_parser("fit", help="Fit a reward model to ratings and picks.")
    fit.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="Name run directories with ratings.jsonl.")
    fit.add_argument("--into", required=True, type=Path, help="Name a folder for the model that does not exist yet.")
    fit.add_argument("--model", type=Path, help="Name the folder to start from; default: the model of the first run.")
    fit.add_argument("--passes", type=_positive(int), default=3, help="Train so many times on all pairs (3).")
    fit.add_argument("--learning-rate", type=_positive(float), default=1e-4, help="Learning rate of AdamW (1e-4).")
    fit.add_argument("--seed", type=int, default=0, help="Decides the held-out prompts and the order (0).")
    fit_model(parser.parse_args(arguments))
    return 0


def _positive(kind: Any) -> Any:
    def number(text: str) -> Any:
        found = kind(text)
        if not 0 < found < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not over 0")
        return found

    return number


def fit_model(asked: argparse.Namespace) -> None:
    """Fits as the arguments ask and prints the held-out accuracy. The folder appears complete or not at all. Raises
    ConfigError for runs without enough preferences, and for folders that cannot be used."""
    if mistake := rate_mistake("adamw", asked.learning_rate):
        print(f"warning: --learning-rate: {mistake}")
    target = asked.into.absolute()
    if target.exists():
        raise ConfigError(f"{asked.into} exists already; name a folder that does not")
    prompts = _preferences(asked.runs, asked.seed)
    learnt, held_out = split(prompts, HELD_OUT, asked.seed)
    policies = [_model_of(run) for run in asked.runs]
    folder = asked.model or policies[0]
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} is no folder of a model: it has no config.json; name another one with --model")
    from asyncrl.engines.training.preference_model import PreferenceModel

    print(f"from {folder}: {_counted(learnt)} to learn from, {_counted(held_out)} held out")
    model = PreferenceModel(folder, asked.learning_rate, asked.seed)
    for policy in policies:
        model.refuse_tokenizer_besides(policy)
    model.fit(learnt, asked.passes, print)
    unfinished = target.with_name(f"{target.name}.part")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        model.save(unfinished)
        unfinished.replace(target)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise ConfigError(f"{asked.into} cannot be written: {error.strerror or error}; name another folder") from error
    print(f"held-out accuracy {model.accuracy(held_out)}")
    print(f'the reward model is in {asked.into}: write reward.model = "{asked.into}"')


def _preferences(runs: Sequence[Path], seed: int) -> list[ComparedPrompt]:
    """Reads the preferences of all runs; raises ConfigError when there are too few."""
    for run in runs:
        if not RunDirectory(run).ratings.exists():
            raise ConfigError(
                f"{run} has no {RunDirectory(run).ratings.name}: nobody rated in this run, or it is no run"
            )
    lines = list(chain.from_iterable(_lines_of(RunDirectory(run).ratings) for run in runs))
    if old := sum(values_of_line(line) != () and lacks_tokens(line) for line in lines):
        print(f"left out: {old} ratings of an earlier version, which kept no tokens")
    prompts = compared_prompts(lines, seed)
    pairs = sum(each.decided for each in prompts)
    decided = sum(each.decided > 0 for each in prompts)
    if pairs < FEWEST_PAIRS or decided < FEWEST_PROMPTS:
        raise ConfigError(
            f"there are {pairs} pairs of better and worse answers to {decided} prompts, and at least "
            f"{FEWEST_PAIRS} pairs to {FEWEST_PROMPTS} prompts are needed: rate more answers, several to each prompt "
            "and not all alike, or pick between answers"
        )
    return prompts


def _lines_of(ratings: Path) -> list[dict[str, Any]]:
    """Reads a file of ratings; raises ConfigError when it is damaged."""
    lines = list(read_lines(ratings))
    for line in lines:
        try:
            compared_prompts([line])
        except (KeyError, TypeError, ValueError) as error:
            said = f"{json.dumps(line)[:100]} is no rating ({type(error).__name__}: {error})"
            raise ConfigError(f"{ratings} is damaged: {said}; remove this line") from None
    return lines


def _model_of(run: Path) -> Path:
    """Returns the folder of the model that a run began with, whose tokenizer made the tokens of its ratings."""
    directory = RunDirectory(run)
    if directory.model.is_dir():
        return directory.model
    if directory.started_before and (named := Path(read(directory.config).model.name).expanduser()).is_dir():
        return named
    raise ConfigError(f"{run} has no model, whose tokenizer made its ratings: name a run as `{program()} run` left it")


def _counted(prompts: Sequence[ComparedPrompt]) -> str:
    return f"{sum(len(each.pairs) for each in prompts)} pairs of {len(prompts)} prompts"
