"""`asyncrl experiments` lists the experiments that come with asyncrl."""

USAGE = f"usage: asyncrl experiments\n\n{__doc__} `asyncrl run NAME` runs one."


def main(arguments: list[str]) -> int:
    if arguments:
        print(USAGE)
        return 0 if arguments[0] in ("-h", "--help") else 2
    from asyncrl.config.sources.packaged_experiments import experiments

    found = experiments()
    width = max(map(len, found), default=0)
    for name, description in found.items():
        print(f"{name:{width}}  {description}")
    return 0
