"""Says in an exported folder where its model comes from: a model card, and the base model of adapters."""

import json
from collections.abc import Iterator
from pathlib import Path

from asyncrl.config.schema import Config
from asyncrl.telemetry.jsonl import read_lines
from asyncrl.telemetry.run_directory import RunDirectory

ADAPTER_CONFIG = "adapter_config.json"


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
