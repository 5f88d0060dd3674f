"""The long mode of the fuzzer: `python long.py TARGET INPUTS CORPUS`; scripts/fuzz runs it.

It is guided by coverage where atheris can, and otherwise changes seeds at random. Ends with status 0 when all inputs
were refused or taken; else the input is in a file `crash-*`, `timeout-*` or `oom-*` of the working directory.
"""

import os
import random
import sys
from contextlib import closing
from hashlib import sha256
from pathlib import Path

SECONDS = 20
MEGABYTES = 1024
LONGEST = 4096
"""Of one input, of the process, and bytes of one input."""
UNGUIDED = ("weights", "port")
"""Targets without coverage to be guided by: torch is not installed beside the fuzzer, and libzmq is not Python."""


def main(name: str, inputs: str, corpus: str) -> None:
    """Runs a target guided by coverage."""
    import atheris

    with atheris.instrument_imports(include=["asyncrl", "tests", "msgpack"]):
        from tests.fuzz.all_targets import TARGETS
    target = TARGETS[name]()
    for number, seed in enumerate(target.seeds):
        Path(corpus, f"seed{number}").write_bytes(seed)
    arguments = [f"-runs={inputs}", f"-timeout={SECONDS}", f"-rss_limit_mb={MEGABYTES}", f"-max_len={LONGEST}"]
    sys.stderr.write(f"{name}: {_resident()} MB before\n")
    atheris.Setup([sys.argv[0], *arguments, "-print_final_stats=1", "-verbosity=0", corpus], target)
    atheris.Fuzz()


def unguided(name: str, inputs: str) -> None:
    """Runs a target with seeds that are changed at random."""
    from tests.fuzz.all_targets import TARGETS

    chance = random.Random(name)
    before = _resident()
    with closing(TARGETS[name]()) as target:
        for _ in range(int(inputs)):
            data = changed(chance.choice(target.seeds), chance)
            try:
                target(data)
            except BaseException:
                Path(f"crash-{sha256(data).hexdigest()[:16]}").write_bytes(data)
                raise
    sys.stderr.write(f"{name}: {before} MB before\nstat::number_of_executed_units: {inputs}\n")
    sys.stderr.write(f"stat::peak_rss_mb: {_resident()}\n")


def changed(seed: bytes, chance: random.Random) -> bytes:
    """Returns a seed with up to five pieces overwritten, inserted, cut out or repeated."""
    data = bytearray(seed)
    for _ in range(chance.randint(1, 5)):
        at = chance.randint(0, len(data))
        length = chance.randint(0, 16)
        piece = chance.choice((chance.randbytes(length), bytes(data[at : at + length]), b"\xff" * length, b""))
        data[at : at + chance.choice((0, len(piece), length))] = piece
    return bytes(data[:LONGEST])


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") >> 20


if __name__ == "__main__":
    if sys.argv[1] in UNGUIDED:
        unguided(*sys.argv[1:3])
    else:
        main(*sys.argv[1:])
