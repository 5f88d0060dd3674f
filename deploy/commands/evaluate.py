"""`asyncrl evaluate` scores a run's newest checkpoint, or any model, on held-out prompts. A policy that acts plays
episodes."""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.deploy.commands.command_parser import CommandParser, positive

if TYPE_CHECKING:
    from asyncrl.controller.observers.evaluation import Evaluation

TRY = (
    "`asyncrl try` runs a few rows of an experiment through prompt, template, model and rewards, without training. "
    "It shows each prompt as the model gets it, the columns of its row, one answer with what every "
    "reward function gave it, and whether the group of its samples would teach anything. "
    "Further flags set config keys, as in `asyncrl run`."
)


def main(arguments: list[str]) -> int:
    asked = _parser().parse_args(arguments)
    from asyncrl.controller.observers.evaluation import write_answers
    from asyncrl.deploy.standalone_evaluation import Wanted, evaluate_target

    answers: list[Any] = []

    def save(name: str, version: int, found: Sequence[Any]) -> None:
        answers.extend(found)

    wanted = Wanted(asked.prompts, asked.size, tuple(asked.set), asked.step, save if asked.answers else None)
    found = asyncio.run(evaluate_target(asked.target, asked.task, lambda line: print(line, file=sys.stderr), wanted))
    if asked.answers:
        write_answers(asked.answers, answers)
    for each in found:
        print(_line(each))
    return 0


def _line(each: "Evaluation") -> str:
    from asyncrl.controller.observers.evaluation import EpisodesEvaluation

    if isinstance(each, EpisodesEvaluation):
        return str(each)
    cost = "" if each.cost is None else f", cost {each.cost:.4f}"
    passed = "".join(f", pass@{k} {rate.mean:.4f}" for k, rate in each.pass_at.items())
    unscorable = f"; {each.unscorable} samples could not be scored" if each.unscorable else ""
    code = f"; {rates} (intervals of 95 %)" if (rates := each.code_rates) else ""
    return (
        f"{f'{each.name}: ' if each.name else ''}reward {each.mean:.4f} ± {each.stderr:.4f} (standard error){cost}"
        f"{passed} over {each.prompts} prompts, version {each.version}, {each.seconds:.1f} s{unscorable}{code}"
    )


def _parser() -> CommandParser:
    parser = CommandParser("asyncrl evaluate", description=__doc__)
    parser.add_argument("target", help="Name a run directory, or a model as model.name does.")
    task_help = "Use the held-out prompts, rewards and costs of this experiment; a run has its own."
    parser.add_argument("--task", metavar="NAME|FILE", help=task_help)
    prompts_help = "Use all prompts of this source, a form of task.prompts, in place of the held-out ones."
    parser.add_argument("--prompts", metavar="FILE", help=prompts_help)
    size_help = "Use at most this many prompts of a set, or so many episodes."
    parser.add_argument("--size", type=positive, default=0, metavar="N", help=size_help)
    set_help = "Use this set of evaluate.sets, several times for several; default: all sets."
    parser.add_argument("--set", action="append", default=[], metavar="NAME", help=set_help)
    parser.add_argument(
        "--step", default="", metavar="N", help="Score the checkpoint of this step of a run, or `best`."
    )
    answers_help = "Write the answers, or the episodes, as JSON lines to this file."
    parser.add_argument("--answers", type=Path, metavar="FILE", help=answers_help)
    return parser


def try_(arguments: list[str]) -> int:
    parser = CommandParser("asyncrl try", description=TRY, allow_abbrev=False)
    parser.add_argument("target", metavar="NAME|FILE", help="Name an experiment, or its TOML file.")
    text = "Try this many rows, those that a run would draw first (default: 3)."
    parser.add_argument("--rows", type=positive, default=3, help=text)
    asked, flags = parser.parse_known_args(arguments)
    from asyncrl.config.problems import refuse
    from asyncrl.config.sources import load
    from asyncrl.deploy.commands.tried_rows import try_rows
    from asyncrl.deploy.preflight import preflight

    loaded = load(asked.target, flags)
    refuse(preflight(loaded.config, places=loaded.sources))
    asyncio.run(try_rows(loaded.config, loaded.sources, asked.rows, lambda line: print(line, flush=True)))
    return 0
