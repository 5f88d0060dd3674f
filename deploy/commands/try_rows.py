"""`asyncrl try` runs a few rows of an experiment through prompt, template, model and rewards, without training."""

import asyncio

from asyncrl.deploy.commands.command_parser import CommandParser, positive

DESCRIPTION = (
    f"{__doc__} It shows each prompt as the model gets it, the columns of its row, one answer with what every "
    "reward function gave it, and whether the group of its samples would teach anything. "
    "Further flags set config keys, as in `asyncrl run`."
)


def main(arguments: list[str]) -> int:
    parser = CommandParser("asyncrl try", description=DESCRIPTION, allow_abbrev=False)
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
