"""`asyncrl audit` checks with three independent witnesses that a run trained each sample at most once and lost none."""

from pathlib import Path

from asyncrl.deploy.commands.command_parser import CommandParser


def main(arguments: list[str]) -> int:
    epilog = "The exit status is 1 when a witness finds a failure."
    parser = CommandParser("asyncrl audit", description=__doc__, epilog=epilog)
    parser.add_argument("run", type=Path, help="Name the run directory to audit.")
    asked = parser.parse_args(arguments)
    from asyncrl.controller.journal.audit import audit

    report = audit(asked.run)
    print(report)
    holds = _sources_hold(asked.run) and report.ok
    print("the audit holds" if holds else "the audit FAILS")
    return 0 if holds else 1


def _sources_hold(run: Path) -> bool:
    """Prints whether the copies of prompts and code have their digests, and which originals changed since."""
    from asyncrl.errors import ConfigError
    from asyncrl.telemetry.run_directory import RunDirectory
    from asyncrl.telemetry.source_copies import changed, damaged_copies, kept, look_at

    folder = RunDirectory(run).sources
    try:
        files = kept(folder)
        damaged = damaged_copies(folder)
    except ConfigError as error:
        files = []
        damaged = [str(error)]
    state = f"FAILS, {len(damaged)} times; first: {damaged[0]}" if damaged else "holds"
    print(f"copies of prompts and code have their digests: {state} ({len(files)} compared)")
    for change in changed(files, look_at((file.key, Path(file.path)) for file in files), folder):
        print(f"note: {change}")
    return not damaged
