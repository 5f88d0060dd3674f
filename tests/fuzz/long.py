"""The long mode of the fuzzer, guided by coverage: `python long.py TARGET INPUTS CORPUS`; scripts/fuzz runs it.

Ends with status 0 when all inputs were refused or taken. Otherwise libFuzzer leaves the input in a file `crash-*`,
`timeout-*` or `oom-*` of the working directory and says so.
"""

import os
import sys
from pathlib import Path

import atheris

TOGETHER = Path(__file__).parent
SECONDS, MEGABYTES, LONGEST = 20, 1024, 4096
"""Of one input, of the process, and bytes of one input."""


def main(name: str, inputs: str, corpus: str) -> None:
    sys.path.insert(0, str(TOGETHER))
    with atheris.instrument_imports(include=["asyncrl", "targets", "msgpack"]):
        from targets import TARGETS
    target = TARGETS[name]()
    for number, seed in enumerate(target.seeds):
        Path(corpus, f"seed{number}").write_bytes(seed)
    arguments = [f"-runs={inputs}", f"-timeout={SECONDS}", f"-rss_limit_mb={MEGABYTES}", f"-max_len={LONGEST}"]
    sys.stderr.write(f"{name}: {_resident()} MB before\n")
    atheris.Setup([sys.argv[0], *arguments, "-print_final_stats=1", "-verbosity=0", corpus], target)
    atheris.Fuzz()


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") >> 20


if __name__ == "__main__":
    main(*sys.argv[1:])
