"""Models of the Hugging Face hub, in the cache that all its programs share (HF_HOME).

commit that the run has noted ──> in the cache? ──> used where it is
revision ──> hub: which commit? ──> files that the cache lacks ──> used where it is, and noted
              └─ offline, or not to be reached ──> the commit that the cache has for the revision
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from glob import escape
from pathlib import Path

from asyncrl.config.sources.keys import closest
from asyncrl.engines.models.model_folder import INDEX, TOKENIZERS, WEIGHTS, is_complete, weight_files
from asyncrl.errors import ConfigError

Show = Callable[[str], None]
NOTED = "hub.json"
"""File of a run directory with the commit of each model of the hub that the run uses."""
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[\w.-]+)?")
COMMIT = re.compile(r"[0-9a-f]{40}")
BESIDE_WEIGHTS = re.compile(r"[^/]+\.(?:json|model|txt|jinja|tiktoken)|additional_chat_templates/[^/]+")
"""Config, tokenizer and templates: all small files of a repository but those of other formats, in folders."""
SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
BINARY = re.compile(r"pytorch_model(?:-\d+-of-\d+)?\.bin")
BINARY_INDEX = "pytorch_model.bin.index.json"


def is_hub_name(name: str) -> bool:
    """Returns whether a value of `model.name` is a name on the hub, and no folder that is here."""
    return HUB_NAME.fullmatch(name) is not None and not Path(name).is_dir()


def needed_files(names: Iterable[str]) -> list[str]:
    """Returns those files of a repository that make a model folder: of weights that it has in several formats or sizes
    one, in the order in which transformers looks for them."""
    there = set(names)
    shards, binaries = ([each for each in there if kind.fullmatch(each)] for kind in (SHARD, BINARY))
    weights = [WEIGHTS] if WEIGHTS in there else shards if INDEX in there else binaries
    unused = {INDEX, BINARY_INDEX} - (
        {INDEX} if weights is shards else {BINARY_INDEX} if weights is binaries else set()
    )
    return sorted({each for each in there - unused if BESIDE_WEIGHTS.fullmatch(each)} | set(weights))


def cached_folder(name: str, revision: str = "") -> Path | None:
    """Returns the folder of a model in the cache, if all of it is there; it asks nobody. revision: branch, tag or
    commit; empty: main."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json", revision=revision or None)
    except HFValidationError:
        return None
    folder = Path(found).parent if isinstance(found, str) else None
    return folder if folder is not None and _is_whole(folder) else None


def _is_whole(folder: Path) -> bool:
    """Returns whether a folder of the cache has all weights and a tokenizer: another program may have asked for parts
    alone."""
    index = folder / BINARY_INDEX
    binaries = set(json.loads(index.read_bytes())["weight_map"].values()) if index.is_file() else ()
    weights = weight_files(folder) or binaries
    has_tokenizer = any(next(folder.glob(pattern), None) for pattern in TOKENIZERS)
    return is_complete(folder) and has_tokenizer and all((folder / each).is_file() for each in weights)


def hub_folder(name: str, key: str, revision: str = "", noted: Path | None = None, show: Show = print) -> Path:
    """Returns the folder of a model of the hub in the cache, after files that it lacks were downloaded. key: that names
    it, for errors. revision: branch, tag or commit; empty: main. noted: file with commits, of which this one is taken,
    or noted. show: gets a line before a download. Raises ConfigError where there is no such model, or none can be had.
    """
    commits: dict[str, str] = json.loads(noted.read_text()) if noted is not None and noted.is_file() else {}
    wanted = f"{name}@{revision}" if revision else name
    commit = commits.get(wanted) or revision
    folder = cached_folder(name, commit) if COMMIT.fullmatch(commit) else None
    folder = folder or _downloaded(name, key, commit, show)
    if noted is not None and commits.get(wanted) != folder.name:
        noted.write_text(json.dumps({**commits, wanted: folder.name}, indent=1) + "\n")
    return folder


def at_noted_commits(names: Mapping[str, str], noted: Path) -> dict[str, str]:
    """Returns the folders of those models of the hub whose commit a run has noted, by the keys that name them. Nothing
    is noted. Raises ConfigError like `hub_folder`."""
    commits: dict[str, str] = json.loads(noted.read_text()) if noted.is_file() else {}
    of_hub = {key: name for key, name in names.items() if name in commits and is_hub_name(name)}
    return {key: str(hub_folder(name, key, commits[name])) for key, name in of_hub.items()}


def _downloaded(name: str, key: str, revision: str, show: Show) -> Path:
    """Returns the folder of what the hub has now, or of what the cache has where the hub gives nothing."""
    from httpx2 import HTTPError
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        listed = HfApi().model_info(name, revision=revision or "main").siblings or ()
        files = needed_files(each.rfilename for each in listed)
        if not any(each.endswith((".safetensors", ".bin")) for each in files):
            raise ConfigError(
                f"{key}: {name} on the hub has no weights that transformers loads (model.safetensors or "
                "pytorch_model.bin): name the model that they were converted from"
            )
        before = cached_folder(name, revision)
        if before is None:
            show(f"downloading {name}")
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=[escape(each) for each in files]))
    except HFValidationError as error:
        raise ConfigError(f"{key}: {name} cannot be a name on the hub: {error}") from error
    except (OSError, HTTPError) as error:
        if (folder := cached_folder(name, revision)) is None:
            raise ConfigError(f"{key}: {why_not(name, revision, error)}") from error
        show(f"{name} is taken from the cache, {folder}: {_first_line(error)}")
        return folder


def why_not(name: str, revision: str, error: Exception) -> str:
    """Returns why there is no folder of a model, and what to do."""
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import (
        GatedRepoError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    match error:
        case GatedRepoError():
            return (
                f"{name} is gated: accept its terms on its page, and let this machine in with `hf auth login` or "
                f"HF_TOKEN ({_first_line(error)})"
            )
        case RevisionNotFoundError():
            return f"{name} has no branch, tag or commit {revision}: correct model.revision, or leave it out"
        case RepositoryNotFoundError():
            return (
                f"the hub has no model {name} that may be read; correct the name, or for a private one let this "
                f"machine in with `hf auth login` or HF_TOKEN ({_first_line(error)})"
            )
    option = f" --revision {revision}" if revision else ""
    near = closest(name, [each.name for each in Path().iterdir() if is_complete(each)])
    meant = f"; did you mean the folder {near}?" if near else ""
    state = "HF_HUB_OFFLINE is set" if isinstance(error, OfflineModeIsEnabled) else _first_line(error)
    return (
        f"{name} is no folder here, is not whole in the cache ({HF_HUB_CACHE}), and could not be downloaded ({state}): "
        f"fill the cache with `hf download {name}{option}` where there is a network, or name a folder{meant}"
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
