"""The command line. Imports nothing but the standard library until it knows which command is meant."""

import difflib
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import asyncrl
from asyncrl.config.install_hints import program
from asyncrl.errors import AsyncrlError
from asyncrl.telemetry.clean_text import clean_streams
from asyncrl.version import __version__

COMMANDS = {
    "run": "train an experiment; with the --run-dir of an earlier run, resume it",
    "init": "write a commented file of an experiment, for a task that it asks about",
    "monitor": "show what the workers of a running run do",
    "dashboard": "show runs live in a browser: workers, curves, samples, pause, scale and stop",
    "scale": "change the number of workers of a service while a run goes on",
    "weights": "show what weights each pipeline stage of a running run's trainer holds",
    "pause": "hold a running run back: it draws no samples and begins no step until unpause",
    "unpause": "let a paused run go on",
    "stop": "end a running run with a checkpoint, after its running step",
    "join": "offer this host to a run, which starts a worker here",
    "admit": "make a key with which workers of one role may join runs",
    "samples": "show what the model wrote, the rewards of its samples, and which tokens were trained",
    "evaluate": "score a run's model, or any model, on held-out prompts",
    "export": "copy the newest good model of a run to a folder that from_pretrained loads",
    "push": "upload the model of a run to the Hugging Face hub",
    "preferences": "fit a reward model to what people said in runs with live feedback",
    "try": "run a few rows through prompt, model and rewards without training, and show each",
    "report": "write the curves, timeline and samples of a run as one HTML file, or compare runs",
    "tune": "search for better values of an experiment's keys with short runs of it",
    "replay": "give a service of a recorded run again what it was given, and say where its answers differ",
    "audit": "check that a run trained each sample at most once and lost none",
    "graph": "print the services, endpoints, protocols and sockets of an experiment",
    "plan": "print where the workers of an experiment run and the memory that they need",
    "experiments": "list the experiments that come with asyncrl",
    "keys": "print every config key with its type, default and meaning",
    "doctor": "check what this machine can run, and what an experiment needs",
}

HOMES = {
    **{name: f"control:{name}" for name in ("pause", "unpause", "stop", "scale", "weights")},
    "admit": "join:admit",
    "push": "export:push",
    "try": "evaluate:try_rows",
}
"""Module and function of the commands that share a file with others; any other is `main` in the file of its name."""

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

EXIT_CODES = {
    0: "The command succeeded; so did a run that the first Ctrl-C (or SIGTERM) ended with a checkpoint.",
    1: "The audit found a failure, the doctor found something to repair, or asyncrl failed.",
    2: "A mistake in command, config, prompts or code, found before a run starts; the message says how to correct it.",
    75: "A run ended for any other reason, a mistake that showed as it trained included; the same command resumes it.",
    130: "The run was interrupted before its last checkpoint; the message names the newest one.",
}

MISTAKE = 2
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code; the arguments are the process's by default."""
    with clean_streams():
        return _main(arguments)


def _main(arguments: Sequence[str] | None) -> int:
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or [""]
    if name == "help" and rest and rest[0] in COMMANDS:
        name, *rest = rest[0], "--help"
    if name in ("", "-h", "--help", "help"):
        print(help_text())
        return 0 if name else MISTAKE
    if name == "--version":
        print(f"asyncrl {__version__}")
        return 0
    if name not in COMMANDS:
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
    near = difflib.get_close_matches(name, COMMANDS, 1, 0.6)
    return f"did you mean `{program()} {near[0]}`?" if near else f"there are {', '.join(COMMANDS)}"


def help_text() -> str:
    width = max(map(len, COMMANDS))
    return "\n".join(
        [
            "usage: asyncrl COMMAND [arguments]        asyncrl COMMAND --help",
            "",
            "asyncrl trains language models with reinforcement learning on a fleet of asyncio services.",
            "",
            *(f"  {name:{width}}  {summary}" for name, summary in COMMANDS.items()),
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
        module, _, function = HOMES.get(name, f"{name}:main").partition(":")
        code: int = getattr(import_module(f"asyncrl.deploy.commands.{module}"), function)(arguments)
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
