"""The command line. Imports nothing but the standard library until it knows which command is meant."""

import sys
from collections.abc import Sequence
from importlib import import_module

from asyncrl import __version__
from asyncrl.errors import AlgorithmError, AsyncrlError, ConfigError, FleetFailed, Interrupted, RewardError, TaskError

COMMANDS = {
    "run": "train an experiment; with the --run-dir of an earlier run, resume it",
    "samples": "show what the model wrote, what it got for it, and which of it was trained",
    "evaluate": "score a run's model, or any model, on held-out prompts",
    "export": "copy the newest good model of a run to a folder that from_pretrained loads",
    "audit": "check that a run trained each sample at most once and lost none",
    "graph": "print the services, endpoints, protocols and sockets of an experiment",
    "experiments": "list the experiments that come with asyncrl",
    "keys": "print every config key with its type, default and meaning",
    "doctor": "check what this machine can run, and what an experiment needs",
}

EXIT_CODES = {
    0: "done; also a run that the first Ctrl-C (or SIGTERM) ended with a checkpoint",
    1: "the audit found a failure, the doctor something to repair, or the run itself or asyncrl failed",
    2: "what you can put right: a command, a flag, the config, the prompts, a reward function; the message says how",
    75: "the fleet could not go on; the same command resumes the run",
    130: "interrupted before training began, or without a last checkpoint; the message names the newest one",
}

MISTAKE, INTERRUPTED = 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code; the arguments are the process's by default."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0 if given else MISTAKE
    if given[0] == "--version":
        print(f"asyncrl {__version__}")
        return 0
    name, *rest = given
    if name not in COMMANDS:
        return _refuse(_unknown(name))
    return _guarded(name, rest)


def help_text() -> str:
    from asyncrl.config.install_hints import program

    width = max(map(len, COMMANDS))
    return "\n".join(
        [
            "usage: asyncrl COMMAND [arguments]        asyncrl COMMAND --help",
            "",
            "Reinforcement learning of language models on a fleet of asyncio services.",
            "",
            *(f"  {name:{width}}  {summary}" for name, summary in COMMANDS.items()),
            "",
            f"Begin with: {program()} run quickstart",
            "",
            "exit codes:",
            *(f"  {code:>3}  {meaning}" for code, meaning in EXIT_CODES.items()),
        ]
    )


def _unknown(name: str) -> str:
    import difflib

    from asyncrl.config.install_hints import program

    near = difflib.get_close_matches(name, COMMANDS, 1, 0.5)
    meant = f"did you mean `{program()} {near[0]}`?" if near else f"there are {', '.join(COMMANDS)}"
    return f"there is no command {name!r}; {meant}"


def _guarded(name: str, arguments: list[str]) -> int:
    """Run a command; mistakes of the user and failures of the fleet are told without a traceback."""
    try:
        code: int = import_module(f"asyncrl.deploy.commands.{name}").main(arguments)
        sys.stdout.flush()
    except (ConfigError, TaskError, RewardError, AlgorithmError) as error:
        return _refuse(str(error))
    except Interrupted as error:
        print(f"asyncrl: {error}", file=sys.stderr)
        return INTERRUPTED
    except FleetFailed as error:
        print(f"asyncrl: {error}", file=sys.stderr)
        return error.exit_code
    except AsyncrlError as error:
        print(f"asyncrl: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # Whoever read our output has gone (`asyncrl keys | head`); Python must not try to flush it once more.
        sys.stdout = None
        return 0
    except KeyboardInterrupt:
        print("asyncrl: interrupted", file=sys.stderr)
        return INTERRUPTED
    return code


def _refuse(text: str) -> int:
    print(f"asyncrl: {text}", file=sys.stderr)
    return MISTAKE


if __name__ == "__main__":
    sys.exit(main())
