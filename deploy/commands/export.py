"""`asyncrl export` copies the model of a run's newest good checkpoint to a folder that from_pretrained loads."""

import argparse
import shutil
from pathlib import Path

from asyncrl.config.install_hints import program
from asyncrl.errors import ConfigError
from asyncrl.telemetry.run_directory import RunDirectory


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("asyncrl export", description=__doc__)
    parser.add_argument("run", type=Path, help="Name the run directory to copy from.")
    parser.add_argument("target", type=Path, help="Name a folder that does not exist yet or is empty.")
    asked = parser.parse_args(arguments)
    version = export(asked.run, asked.target)
    print(f"version {version} is in {asked.target}: AutoModelForCausalLM.from_pretrained({str(asked.target)!r})")
    return 0


def export(run_dir: Path, target: Path) -> int:
    """Copies the model; returns its version. The target appears complete or not at all. Raises ConfigError for a
    mistake in the arguments, and JournalError when none of the run's checkpoints is good."""
    target = target.absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists already; name a folder that does not")
    if not RunDirectory(run_dir).started_before:
        raise ConfigError(f"{run_dir} holds no run: name a directory made by `{program()} run --run-dir`")
    from asyncrl.controller.journal.checkpoints import newest_model

    model, version = newest_model(run_dir)
    unfinished = target.with_name(f"{target.name}.part")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        shutil.copytree(model, unfinished)
        unfinished.replace(target)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise ConfigError(f"{target} cannot be written: {error.strerror or error}; name another folder") from error
    return version
