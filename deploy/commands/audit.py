"""asyncrl audit: three independent witnesses that each sample was trained at most once and none was lost."""

import argparse
from pathlib import Path


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("asyncrl audit", description=__doc__, epilog="exit status 1: a witness fails")
    parser.add_argument("run", type=Path, help="a run directory")
    asked = parser.parse_args(arguments)
    from asyncrl.controller.journal.audit import audit

    report = audit(asked.run)
    print(report)
    return 0 if report.ok else 1
