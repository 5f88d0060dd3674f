"""`asyncrl export` copies the model of a run's newest good checkpoint, or of another one, to a folder that
from_pretrained loads. The adapters of a run with model.lora are copied as a folder that peft loads, or merged into the
model with --merge."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from asyncrl.config.sources import read
from asyncrl.deploy.commands.command_parser import CommandParser
from asyncrl.engines.acting.stepping.spaces_file import SPACES
from asyncrl.engines.models.model_folder import ADAPTER_CONFIG, base_folder, is_in_parts
from asyncrl.engines.models.weights_digest import refuse_other_base
from asyncrl.errors import ConfigError
from asyncrl.telemetry.run_directory import NO_RUN, RunDirectory, missing_run


def main(arguments: list[str]) -> int:
    parser = CommandParser("asyncrl export", description=__doc__)
    parser.add_argument("run", type=Path, help="Name the run directory to copy from.")
    parser.add_argument("target", type=Path, help="Name a folder that does not exist yet or is empty.")
    parser.add_argument("--merge", action="store_true", help="Merge the adapters of a run with model.lora.")
    parser.add_argument("--step", default="", metavar="N", help="Copy the checkpoint of this step, or `best`.")
    asked = parser.parse_args(arguments)
    version = export(asked.run, asked.target, merged=asked.merge, step=asked.step)
    call = f"AutoModelForCausalLM.from_pretrained({str(asked.target)!r})"
    if (asked.target / SPACES).exists():
        call = f"asyncrl evaluate {asked.target} --task EXPERIMENT"
    elif (asked.target / ADAPTER_CONFIG).exists():
        call = f"PeftModel.from_pretrained(base_model, {str(asked.target)!r})"
    print(f"version {version} is in {asked.target}: {call}")
    return 0


def export(run_dir: Path, target: Path, *, merged: bool = False, step: str = "") -> int:
    """Copies the model, or merges its adapters into it; returns its version. step: as in `chosen_model`. The target
    appears complete or not at all. Raises ConfigError for a mistake in the arguments, and JournalError when none of the
    run's checkpoints is good."""
    target = target.absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists already; name a folder that does not")
    if not RunDirectory(run_dir).started_before:
        raise missing_run(run_dir, NO_RUN)
    from asyncrl.controller.journal.best_checkpoint import chosen_model

    model, version = chosen_model(run_dir, step)
    write: Callable[[Path], object] = partial(_gather if is_in_parts(model) else shutil.copytree, model)
    if merged:
        config = read(RunDirectory(run_dir).config)
        if config.model.lora is None:
            raise ConfigError(f"{run_dir} trained all weights, so there is nothing to merge: leave out --merge")
        base = base_folder(run_dir, config)
        refuse_other_base(model.parent, base)
        write = partial(_merge, model, base)
    unfinished = target.with_name(f"{target.name}.part")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        write(unfinished)
        unfinished.replace(target)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise ConfigError(f"{target} cannot be written: {error.strerror or error}; name another folder") from error
    return version


def _gather(model: Path, target: Path) -> None:
    from asyncrl.engines.models.tensor_parts import gather_model

    gather_model(model, target)


def _merge(adapters: Path, base: Path, target: Path) -> None:
    from asyncrl.engines.lora.peft_folder import merge

    merge(adapters, base, target)
