"""The command line. Imports nothing but the standard library until it knows which command is meant."""

import difflib
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from keyword import iskeyword
from pathlib import Path
from typing import NamedTuple

import asyncrl
from asyncrl.config.install_hints import program
from asyncrl.errors import AsyncrlError
from asyncrl.telemetry.clean_text import clean_streams
from asyncrl.version import __version__

MEANT = {
    **dict.fromkeys(("train", "resume", "start", "launch", "fit"), "run"),
    **dict.fromkeys(("status", "logs", "log", "top", "ps", "watch"), "monitor"),
    **dict.fromkeys(("ui", "web", "view"), "dashboard"),
    **dict.fromkeys(("list", "ls", "examples"), "experiments"),
    **dict.fromkeys(("kill", "cancel", "abort"), "stop"),
    **dict.fromkeys(("config", "options", "params"), "keys"),
    **dict.fromkeys(("test", "preview"), "try"),
    **dict.fromkeys(("validate", "check"), "doctor"),
    **dict.fromkeys(("continue", "go"), "unpause"),
    **dict.fromkeys(("save", "convert", "merge"), "export"),
    **dict.fromkeys(("upload", "publish"), "push"),
    **dict.fromkeys(("new", "create"), "init"),
    **dict.fromkeys(("sweep", "search"), "tune"),
    "serve": "join",
    **dict.fromkeys(("version", "-V", "-v"), "--version"),
}
"""Commands by words that other programs have for them."""

EXPERIMENTS = Path(asyncrl.__file__).parent / "experiments"
FOLDER = Path(__file__).parent / "commands"
DESCRIPTION = re.compile(r'^(?:[A-Z]+ = \(?\s*)?"{1,3}`asyncrl (\w+)[^`]*` ([^.:]*)', re.MULTILINE)
"""Begin of the text that describes a command, in the file that has the command."""

EXIT_CODES = {
    0: "The command succeeded; so did a run that the first Ctrl-C (or SIGTERM) ended with a checkpoint.",
    1: "The audit found a failure, the doctor found something to repair, or asyncrl failed.",
    2: "A mistake in command, config, prompts or code, found before a run starts; the message says how to correct it.",
    75: "A run ended for any other reason, a mistake that showed as it trained included; the same command resumes it.",
    130: "The run was interrupted before its last checkpoint; the message names the newest one.",
}

MISTAKE = 2
INTERRUPTED = 130


class Command(NamedTuple):
    """A command. summary: what it does, by the begin of its description."""

    module: str
    function: str
    summary: str


@cache
def commands() -> dict[str, Command]:
    """Returns all commands by name, as their files describe them; none is imported. A command is `main` in the file of
    its name, and a function of its name in the file of another one."""
    found = {}
    for path in FOLDER.glob("*.py"):
        for name, summary in DESCRIPTION.findall(path.read_text("utf-8")):
            function = "main" if name == path.stem else f"{name}_" if iskeyword(name) else name
            found[name] = Command(f"asyncrl.deploy.commands.{path.stem}", function, " ".join(summary.split()))
    return dict(sorted(found.items()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code; the arguments are the process's by default."""
    with clean_streams():
        return _main(arguments)


def _main(arguments: Sequence[str] | None) -> int:
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or [""]
    if name == "help" and rest and rest[0] in commands():
        name, *rest = rest[0], "--help"
    if name in ("", "-h", "--help", "help"):
        print(help_text())
        return 0 if name else MISTAKE
    if name == "--version":
        print(f"asyncrl {__version__}")
        return 0
    if name not in commands():
        return _fail(f"there is no command {name!r}; {_meant(name)}", MISTAKE)
    return _run_command(name, rest)


def _meant(name: str) -> str:
    """Returns what to type instead of a word that is no command."""
    if name in MEANT:
        return f"did you mean `{program()} {MEANT[name]}`?"
    if name.endswith(".toml") or (EXPERIMENTS / f"{name}.toml").is_file():
        return f"did you mean `{program()} run {name}`?"
    if name.startswith("-"):
        return f"the command comes first, and then its options: `{program()} COMMAND --help`"
    near = difflib.get_close_matches(name, commands(), 1, 0.6)
    return f"did you mean `{program()} {near[0]}`?" if near else f"there are {', '.join(commands())}"


def help_text() -> str:
    width = max(map(len, commands()))
    return "\n".join(
        [
            "usage: asyncrl COMMAND [arguments]        asyncrl COMMAND --help",
            "",
            "asyncrl trains language models with reinforcement learning on a fleet of asyncio services.",
            "",
            *(f"  {name:{width}}  {each.summary}" for name, each in commands().items()),
            "",
            f"Begin with: {program()} run quickstart",
            "",
            "exit codes:",
            *(f"  {code:>3}  {meaning}" for code, meaning in EXIT_CODES.items()),
        ]
    )


def _run_command(name: str, arguments: list[str]) -> int:
    """Runs a command; prints mistakes of the user and failures of the fleet without a traceback."""
    try:
        if any(argument.startswith("s3://") for argument in arguments):
            from asyncrl.deploy.process.stored_runs import read_here

            arguments = read_here(name, arguments)
        command = commands()[name]
        code: int = getattr(import_module(command.module), command.function)(arguments)
        sys.stdout.flush()
        return code
    except AsyncrlError as error:
        return _fail(str(error), error.exit_code)
    except BrokenPipeError:
        # Whoever read our output has gone (`asyncrl keys | head`); Python must not try to flush it once more.
        sys.stdout = None
        return 0
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)


def _fail(text: str, code: int) -> int:
    with suppress(OSError):  # The terminal may be gone.
        print(f"asyncrl: {text}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
