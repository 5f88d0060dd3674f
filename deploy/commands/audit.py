"""`asyncrl audit` checks with three independent witnesses that a run trained each sample at most once and lost none."""

import argparse
from pathlib import Path


def main(arguments: list[str]) -> int:
    epilog = "The exit status is 1 when a witness finds a failure."
    parser = argparse.ArgumentParser("asyncrl audit", description=__doc__, epilog=epilog)
    parser.add_argument("run", type=Path, help="Name the run directory to audit.")
    asked = parser.parse_args(arguments)
    from asyncrl.controller.journal.audit import audit

    report = audit(asked.run)
    print(report)
    return 0 if report.ok else 1
