"""asyncrl experiments: list what comes with the package."""

USAGE = "usage: asyncrl experiments        run one with `asyncrl run NAME`"


def main(arguments: list[str]) -> int:
    if arguments:
        print(USAGE)
        return 0 if arguments[0] in ("-h", "--help") else 2
    from asyncrl.experiments import experiments

    found = experiments()
    width = max(map(len, found), default=0)
    for name, description in found.items():
        print(f"{name:{width}}  {description}")
    return 0
