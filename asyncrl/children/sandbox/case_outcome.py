"""Decides how a test case ended, from what the first process of its sandbox reports and what the program printed."""

import os
import signal

from asyncrl.children.sandbox.program_requests import CaseResult, Limits, Outcome, TestCase
from asyncrl.children.sandbox.single_sandbox import Report, SandboxEnded

OF_SIGNAL: dict[int, Outcome] = {signal.SIGXCPU: "timeout", signal.SIGXFSZ: "disk", signal.SIGSYS: "forbidden"}
LIMITS: dict[str, Outcome] = {
    "timeout": "timeout",
    "memory": "memory",
    "output": "output",
    "disk": "disk",
    "processes": "processes",
}
NOTED = ("memory", "disk", "processes")
"""Limits of which an error tells, which the process of the program notes itself; of the others it has no word."""
EXPLAINED: dict[Outcome, str] = {
    "timeout": "it ran longer than {0.seconds:g} s, or computed longer than {0.cpu_seconds} s",
    "memory": "it needed more than {0.memory_bytes} bytes of memory",
    "output": "it printed more than {0.output_bytes} bytes",
    "disk": "it wrote more than {0.disk_bytes} bytes or ten thousand files",
    "processes": "it started more than {0.processes} processes and threads",
    "forbidden": "it made a system call that no program needs",
}
Outputs = tuple[bytes, bytes]


def script_result(test: TestCase, report: Report, outputs: Outputs, limits: Limits) -> CaseResult:
    """Returns the result of a case that reads stdin and prints."""
    outcome, detail = _limit(report, outputs, limits)
    if outcome is None and report.status != 0:
        outcome = "error"
        detail = detail or f"it ended with status {os.waitstatus_to_exitcode(report.status)}"
    if outcome is None and test.stdout is not None and not same_text(outputs[0].decode(errors="replace"), test.stdout):
        outcome = "failed"
        detail = "it printed something else"
    return _result(test, outcome or "passed", detail, report, outputs, limits)


def exam_result(test: TestCase, exam: Report, report: Report, outputs: Outputs, limits: Limits) -> CaseResult:
    """Returns the result of a case with code. exam: report of the examiner, which alone decides that a case passed."""
    outcome, _, detail = exam.note.partition("\n")
    limited, why = _limit(report, outputs, limits)
    if limited is not None:
        return _result(test, limited, why, report, outputs, limits)
    if exam.status != 0 or exam.why != "-":
        late, why = _limit(exam, (b"", b""), limits)
        return _result(test, late or "error", f"the test: {why or 'it ended early'}", report, outputs, limits)
    match outcome:
        case "passed" if os.WIFEXITED(report.status) and os.WEXITSTATUS(report.status):
            return _result(test, "error", why or "the program ended with an error", report, outputs, limits)
        case "passed" | "failed" | "error" | "forged":
            return _result(test, outcome, detail, report, outputs, limits)
        case _:
            return _result(test, "error", why or detail, report, outputs, limits)


def unreported_result(test: TestCase, ended: SandboxEnded, outputs: Outputs, limits: Limits) -> CaseResult:
    """Returns the result of a case whose sandbox ended."""
    stdout, stderr = (text[: limits.output_bytes].decode(errors="replace") for text in outputs)
    return CaseResult(test.name, ended.outcome, stdout, stderr, detail=f"its sandbox: {ended}")


def same_text(printed: str, wanted: str) -> bool:
    """Compares texts without spaces at the ends of lines and empty lines at the end."""
    return _lines(printed) == _lines(wanted)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _limit(report: Report, outputs: Outputs, limits: Limits) -> tuple[Outcome | None, str]:
    """Returns the limit or the signal that ended the program, and the text of its error."""
    kind, _, error = report.note.partition("\n")
    outcome = LIMITS.get(report.why)
    if outcome is None and any(len(output) > limits.output_bytes for output in outputs):
        outcome = "output"
    if outcome is None and report.why == "-" and os.WIFSIGNALED(report.status):
        number = os.WTERMSIG(report.status)
        outcome = OF_SIGNAL.get(number, "killed")
        error = f"it was ended by {signal.Signals(number).name}"
    if outcome is None and report.status != 0 and kind in NOTED:
        outcome = LIMITS[kind]
    if outcome in EXPLAINED:
        return outcome, EXPLAINED[outcome].format(limits)
    return outcome, error


def _result(
    test: TestCase, outcome: Outcome, detail: str, report: Report, outputs: Outputs, limits: Limits
) -> CaseResult:
    stdout, stderr = (text[: limits.output_bytes].decode(errors="replace") for text in outputs)
    status = None if report.why != "-" else os.waitstatus_to_exitcode(report.status)
    used = report.seconds, report.cpu_seconds, report.memory_bytes
    return CaseResult(test.name, outcome, stdout, stderr, status, *used, _printable(detail))


def _printable(text: str) -> str:
    """Writes what a terminal would obey as Python does: names of classes and texts of errors are the program's."""
    return "".join(each if each.isprintable() or each == "\n" else repr(each)[1:-1] for each in text)
