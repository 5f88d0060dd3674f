"""`asyncrl report` writes the report of a run as one HTML file, or a comparison of several runs."""

from pathlib import Path

from asyncrl.deploy.commands.command_parser import CommandParser

DESCRIPTION = f"""{__doc__} A run writes its own, RUN_DIR/report.html, when it ends (telemetry.report). The file loads
nothing from elsewhere."""


def main(arguments: list[str]) -> int:
    parser = CommandParser("asyncrl report", description=DESCRIPTION)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN_DIR", help="Name the run directories to show.")
    parser.add_argument(
        "--to", type=Path, metavar="FILE", help="Write FILE (default: RUN_DIR/report.html; ./report.html of several)."
    )
    asked = parser.parse_args(arguments)
    from asyncrl.deploy.report.report_page import write_report
    from asyncrl.deploy.report.run_record import read_run
    from asyncrl.errors import ConfigError
    from asyncrl.telemetry.run_directory import RunDirectory

    runs = [read_run(path) for path in asked.runs]
    target = asked.to or RunDirectory(runs[0].path if len(runs) == 1 else Path()).report
    try:
        write_report(runs, target)
    except OSError as error:
        raise ConfigError(f"the report cannot be written to {target}: {error.strerror}; name another --to") from error
    print(f"the report is in {target}")
    return 0
