"""`asyncrl evaluate` scores a run's newest checkpoint, or any model, on held-out prompts."""

import argparse
import asyncio
import sys


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("asyncrl evaluate", description=__doc__)
    parser.add_argument("target", help="Name a run directory, or a model as model.name does.")
    task_help = "Use the held-out prompts, rewards and costs of this experiment; a run has its own."
    parser.add_argument("--task", metavar="NAME|FILE", help=task_help)
    asked = parser.parse_args(arguments)
    from asyncrl.deploy.standalone_evaluation import evaluate_target

    found = asyncio.run(evaluate_target(asked.target, asked.task, lambda line: print(line, file=sys.stderr)))
    cost = "" if found.cost is None else f", cost {found.cost:.4f}"
    unscorable = f"; {found.unscorable} samples could not be scored" if found.unscorable else ""
    code = "" if found.code is None else f"; {found.code} (intervals of 95 %)"
    print(
        f"reward {found.mean:.4f} ± {found.stderr:.4f} (standard error){cost} over {found.prompts} prompts, "
        f"version {found.version}, {found.seconds:.1f} s{unscorable}{code}"
    )
    return 0
