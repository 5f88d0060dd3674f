"""`asyncrl export` copies the model of a run's newest good checkpoint, or of another one, to a folder that
from_pretrained loads. The adapters of a run with model.lora are copied as a folder that peft loads, or merged into the
model with --merge. The folder of a critic can be the `critic.model` of another run."""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from asyncrl.config.schema import Config
from asyncrl.config.sources import read
from asyncrl.deploy.commands.command_parser import CommandParser
from asyncrl.engines.acting.stepping.spaces import SPACES
from asyncrl.engines.generation.tokenization import write_ends
from asyncrl.engines.models.model_folder import (
    ADAPTER_CONFIG,
    CRITICS,
    EXPORTED,
    base_folder,
    is_in_parts,
    refuse_other_base,
)
from asyncrl.errors import ConfigError
from asyncrl.telemetry.jsonl import read_lines
from asyncrl.telemetry.run_directory import NO_RUN, RunDirectory, missing_run

# Says in an exported folder where its model comes from: a model card, and the base model of adapters.


def write_origin(folder: Path, run: RunDirectory, config: Config, model: str, version: int, *, public: bool) -> None:
    """Writes README.md, the base model of adapters into their config, and lets others read as the umask does. model:
    policy, or a critic. public: nothing in the folder names a path of this machine."""
    base, commit = base_model(run, config)
    path = folder / ADAPTER_CONFIG
    has_adapters = path.is_file()
    if has_adapters:
        named = {"revision": commit} if commit else {}
        local = (
            _without_folder(config.model.name) if public else json.loads(path.read_text())["base_model_name_or_path"]
        )
        described = json.loads(path.read_text()) | {"base_model_name_or_path": base or local} | named
        path.write_text(json.dumps(described, indent=2) + "\n")
    kind = "peft" if has_adapters else "transformers"
    front = [f"base_model: {base}"] if base else []
    front += [f"library_name: {kind}", "tags:", *(f"- {tag}" for tag in ("asyncrl", "reinforcement-learning"))]
    if model == "policy" and not config.acting.env:
        front.append("pipeline_tag: text-generation")
    text = ["---", *front, "---", "", f"# {config.name}", "", *_facts(run, config, model, version, base, commit)]
    (card := folder / "README.md").write_text("\n".join(text) + "\n", encoding="utf-8")
    for path in filter(Path.is_file, folder.rglob("*")):  # Libraries write weights that nobody else may read.
        path.chmod(card.stat().st_mode)


def base_model(run: RunDirectory, config: Config) -> tuple[str, str]:
    """Returns name and commit of the model of the hub that a run began with; two empty texts for any other model."""
    name = config.model.name
    revision = config.model.revision
    commits = json.loads(run.hub.read_text()) if run.hub.is_file() else {}
    commit = commits.get(f"{name}@{revision}" if revision else name, "")
    return (name, commit) if commit else ("", "")


def _without_folder(name: str) -> str:
    """Returns a value of the config without the folders of a path in it."""
    source, colon, rest = name.partition(":")
    return f"{source}:{Path(rest).name}" if colon and "/" in rest else Path(name).name


def _facts(run: RunDirectory, config: Config, model: str, version: int, base: str, commit: str) -> Iterator[str]:
    """Yields the lines of the card behind its title."""
    began = f"[{base}](https://huggingface.co/{base}) at {commit}" if base else _without_folder(config.model.name)
    algorithm = config.acting.algorithm if config.acting.env else config.algorithm.custom or config.algorithm.preset
    yield f"The {model.replace('_', ' ')} of a reinforcement-learning run of asyncrl."
    yield from ("", "| | |", "|---|---|", f"| base model | {began} |", f"| experiment | {config.name} |")
    yield f"| steps | {version} of {config.steps} |"
    yield f"| algorithm | {_without_folder(algorithm)} |"
    for line in {
        each.get("name", ""): each for each in read_lines(run.evaluations) if each["version"] == version
    }.values():
        held_out = f"held out, {line['name']}" if line.get("name") else "held out"
        if "mean" in line:
            yield f"| {held_out} | reward {line['mean']:.3f} ± {line['stderr']:.3f} over {line['prompts']} prompts |"


POLICY = "policy"
DTYPES = ("float32", "bfloat16", "float16")
PUSH = (
    "`asyncrl push` uploads the model of a run's newest good checkpoint, or of another one, to the Hugging Face hub. "
    "HF_TOKEN, or `hf auth login`, lets it in."
)


def main(arguments: list[str]) -> int:
    parser = CommandParser("asyncrl export", description=__doc__)
    parser.add_argument("run", type=Path, help="Name the run directory to copy from.")
    parser.add_argument("target", type=Path, help="Name a folder that does not exist yet or is empty.")
    parser.add_argument("--merge", action="store_true", help="Merge the adapters of a run with model.lora.")
    parser.add_argument("--step", default="", metavar="N", help="Copy the checkpoint of this step, or `best`.")
    parser.add_argument("--dtype", choices=DTYPES, help="Write weights so; default: model.dtype of the run.")
    model_help = "Copy this model; default: policy."
    parser.add_argument("--model", choices=[POLICY, *CRITICS], default=POLICY, help=model_help)
    asked = parser.parse_args(arguments)
    wanted = {"merged": asked.merge, "step": asked.step, "model": asked.model, "dtype": asked.dtype or ""}
    version = export(asked.run, asked.target, **wanted)
    call = f"AutoModelForCausalLM.from_pretrained({str(asked.target)!r})"
    if asked.model in CRITICS:
        call = f"{asked.model}.model = {str(asked.target)!r}"
    elif (asked.target / SPACES).exists():
        call = f"asyncrl evaluate {asked.target} --task EXPERIMENT"
    elif (asked.target / ADAPTER_CONFIG).exists():
        call = f"PeftModel.from_pretrained(base_model, {str(asked.target)!r})"
    print(f"version {version} is in {asked.target}: {call}")
    return 0


def export(
    run_dir: Path,
    target: Path,
    *,
    merged: bool = False,
    step: str = "",
    model: str = POLICY,
    dtype: str = "",
    public: bool = False,
) -> int:
    """Copies the model, or merges its adapters into it; returns its version. step: as in `chosen_model`. model: the
    policy or one of CRITICS. dtype: of weights; empty: model.dtype for a policy, else as they are. public: as in
    `write_origin`. The target appears complete or not at all. Raises ConfigError for a mistake in the arguments, and
    JournalError when none of the run's checkpoints is good."""
    target = target.absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists already; name a folder that does not")
    if not RunDirectory(run_dir).started_before:
        raise missing_run(run_dir, NO_RUN)
    from asyncrl.controller.journal.checkpoints import chosen_model

    policy, version = chosen_model(run_dir, step)
    folder = policy if model == POLICY else _critic_folder(policy.parent, model, merged=merged)
    write: Callable[[Path], object] = partial(_gather if is_in_parts(folder) else shutil.copytree, folder)
    config = read(RunDirectory(run_dir).config)
    if merged:
        if config.model.lora is None:
            raise ConfigError(f"{run_dir} trained all weights, so there is nothing to merge: leave out --merge")
        base = base_folder(run_dir, config)
        refuse_other_base(policy.parent, base)
        write = partial(_merge, policy, base)
    unfinished = target.with_name(f"{target.name}.part")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        write(unfinished)
        if precision := dtype or ("" if model in CRITICS or config.acting.env else config.model.dtype):
            _round(folder, unfinished, precision)
        if model == POLICY and (unfinished / "config.json").is_file():
            write_ends(unfinished)
        (unfinished / EXPORTED).write_text(json.dumps({"model": model, "version": version}) + "\n")
        write_origin(unfinished, RunDirectory(run_dir), config, model, version, public=public)
        unfinished.replace(target)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise ConfigError(f"{target} cannot be written: {error.strerror or error}; name another folder") from error
    return version


def _critic_folder(checkpoint: Path, critic: str, *, merged: bool) -> Path:
    """Returns the model folder of a critic in a checkpoint. Raises ConfigError when there is none, and for --merge."""
    if merged:
        raise ConfigError(f"--merge is for adapters of the policy, and a {critic} has none: leave it out")
    folder = checkpoint / critic / "model"
    if not folder.is_dir():
        raise ConfigError(f"checkpoint {checkpoint} holds no {critic}: the algorithm of its run trains none")
    return folder


def _gather(model: Path, target: Path) -> None:
    from asyncrl.engines.models.tensor_parts import gather_model

    gather_model(model, target)


def _round(source: Path, folder: Path, dtype: str) -> None:
    """Rounds the copied weights of a model or of adapters, a file at a time. They are float32 in checkpoints; files
    that a checkpoint links to have the type of the model that the run began with."""
    for path in folder.glob("*.safetensors"):
        if dtype == "float32" and not (source / path.name).is_symlink():
            continue
        import torch
        from safetensors.torch import load_file, save_file

        kind = getattr(torch, dtype)
        tensors = load_file(path)
        rounded = {name: each.to(kind) if each.is_floating_point() else each for name, each in tensors.items()}
        path.unlink()  # The copy of a file that may only be read cannot be written to.
        save_file(rounded, path, metadata={"format": "pt"})
    if (path := folder / "config.json").is_file():
        path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": dtype}, indent=2) + "\n")


def _merge(adapters: Path, base: Path, target: Path) -> None:
    from asyncrl.engines.models.lora import merge

    merge(adapters, base, target)


def push(arguments: list[str]) -> int:
    parser = CommandParser("asyncrl push", description=PUSH)
    parser.add_argument("run", type=Path, help="Name the run directory to upload from.")
    parser.add_argument("name", help="Name the model on the hub, OWNER/NAME; it is made when it does not exist.")
    parser.add_argument("--step", default="", metavar="N", help="Upload the checkpoint of this step, or `best`.")
    parser.add_argument("--merge", action="store_true", help="Merge the adapters of a run with model.lora.")
    parser.add_argument("--public", action="store_true", help="Let everybody see a model that is made now.")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="asyncrl-push-") as scratch:
        folder = Path(scratch) / "model"
        version = export(asked.run, folder, merged=asked.merge, step=asked.step, public=True)
        address = upload(folder, asked.name, f"asyncrl: step {version} of {asked.run.name}", public=asked.public)
    print(f"version {version} is at {address}")
    return 0


def upload(folder: Path, name: str, message: str, *, public: bool) -> str:
    """Uploads the files of a folder as one commit; returns its address. Raises ConfigError when the hub refuses it or
    cannot be reached."""
    from httpx2 import HTTPError
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError

    api = HfApi()
    try:
        api.create_repo(name, private=not public, exist_ok=True)
        done = api.upload_folder(repo_id=name, folder_path=folder, commit_message=message)
    except (HTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ConfigError(
            f"{name} could not be uploaded to {api.endpoint}: {reason}; look at the name, HF_TOKEN and the network"
        ) from error
    return str(done.commit_url)
