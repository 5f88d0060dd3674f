"""`asyncrl experiments` lists the experiments that come with asyncrl."""

from asyncrl.config.install_hints import program
from asyncrl.errors import ConfigError

USAGE = f"usage: asyncrl experiments\n\n{__doc__} `asyncrl run NAME` runs one."


def main(arguments: list[str]) -> int:
    if arguments[:1] in (["-h"], ["--help"]):
        print(USAGE)
        return 0
    if arguments:
        raise ConfigError(f"`asyncrl experiments` takes no arguments; `{program()} run NAME` runs one")
    from asyncrl.experiments import experiments

    found = experiments()
    width = max(map(len, found), default=0)
    for name, description in found.items():
        print(f"{name:{width}}  {description}")
    return 0
