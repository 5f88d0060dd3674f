"""Builds the command that contains a child with bubblewrap: it keeps the user and sees the machine, but not the fleet.

    /                        read-only; /proc has the child's own processes
    /tmp, /var/tmp, /run, /dev/shm     empty and its own, but for the folders of its code
    the run, the sockets     empty
    folders of runs          as they were when the child began, without keys: what begins there later is not seen
    secrets                  the paths that the config names as secret, and where programs keep tokens: empty
    children.writable        as outside

The child is the same user outside, whose files it may need: packages, models, data. Where that is root, /proc is
read-only and without facts about the machine: the settings of the kernel belong to root, with or without its rights.
That keeps the child from starting sandboxes of its own, which other users can.
"""

import os
import re
import sys
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from asyncrl.children.guard_program import SIGNAL_STATUS
from asyncrl.children.sandbox.bubblewrap import PROC, bubblewrap_path, run_trial
from asyncrl.config.secret_places import secrets_of_runs

if TYPE_CHECKING:
    from asyncrl.config.schema import Config  # not at run time: children do without pydantic

LARGEST_FOLDER = 2**30
"""Bytes that each of the folders in memory may take, as far as there is memory."""
PACKAGE = Path(__file__).parents[2]
SHARED = ("/tmp", "/var/tmp", "/run", "/dev/shm")
"""Folders in which programs leave sockets for others. That of temporary files, where it is another one, is one too."""
NAME_RESOLUTION = "/etc/resolv.conf"
GPUS = ("/dev/nvidia*", "/dev/dri", "/dev/kfd")
WHAT = "your reward functions and environments"
TOKENS = """
~/.aws ~/.azure ~/.config/gcloud ~/.boto ~/.s3cfg ~/.oci ~/.config/rclone ~/.rclone.conf ~/.ssh ~/.gnupg ~/.netrc
~/_netrc ~/.password-store ~/.local/share/keyrings ~/.vault-token ~/.ray/auth_token ~/.kube ~/.docker
~/.config/containers ~/.cache/huggingface/token ~/.cache/huggingface/stored_tokens ~/.huggingface ~/.config/wandb
~/.kaggle ~/.comet.config ~/.neptune ~/.config/openai ~/.openai ~/.config/anthropic ~/.anthropic ~/.databrickscfg
~/.modal.toml ~/.git-credentials ~/.config/git/credentials ~/.config/gh ~/.config/glab-cli ~/.npmrc ~/.pypirc
~/.config/pip ~/.pip ~/.cargo/credentials ~/.cargo/credentials.toml ~/.gem/credentials ~/.terraform.d ~/.terraformrc
~/.pgpass ~/.my.cnf ~/.bash_history ~/.zsh_history ~/.python_history ~/.local/share/fish/fish_history /etc/shadow
~/.runpod ~/.config/vastai ~/.config/doctl ~/.fly ~/.sky ~/.lambda_cloud ~/.config/sops ~/.local/share/uv/credentials
~/.local/share/jupyter/runtime ~/.m2/settings.xml ~/.yarnrc.yml ~/.subversion/auth ~/.ash_history ~/.sh_history
~/.psql_history ~/.mysql_history ~/.node_repl_history ~/.viminfo ~/.lesshst
/etc/gshadow /etc/ssh /etc/ssl/private /etc/krb5.keytab /etc/kubernetes /var/lib/kubelet
"""
"""Paths at which programs keep keys, tokens and passwords, and shells the commands that may hold some."""
MOVED = """
HF_HOME/token HF_HOME/stored_tokens XDG_CACHE_HOME/huggingface/token XDG_CACHE_HOME/huggingface/stored_tokens
XDG_CONFIG_HOME/gcloud XDG_CONFIG_HOME/rclone XDG_CONFIG_HOME/gh XDG_CONFIG_HOME/git/credentials XDG_CONFIG_HOME/pip
AWS_CONFIG_FILE NETRC KUBECONFIG DOCKER_CONFIG GNUPGHOME CLOUDSDK_CONFIG AZURE_CONFIG_DIR PGPASSFILE BOTO_CONFIG
CARGO_HOME/credentials CARGO_HOME/credentials.toml PIP_CONFIG_FILE GH_CONFIG_DIR NPM_CONFIG_USERCONFIG RCLONE_CONFIG
WANDB_CONFIG_DIR KAGGLE_CONFIG_DIR GIT_CONFIG_GLOBAL HISTFILE DATABRICKS_CONFIG_FILE OCI_CLI_CONFIG_FILE
"""
"""Variables that say where some of these are instead, beside those whose name says that they are a secret."""
OF_SECRETS = re.compile(r"(?i)(^|_)(api)?(key|token|secret|pass(word|wd|phrase|file)?|cred(ential)?s?|auth)(_|$)")
"""In names of variables that hold a secret, or the path of one."""
UNCONTAINED = 'write sandbox = "none" in the section [children], which contains nothing'

RUNS_BY_DEFAULT = "runs/any"
MOST_ENTRIES = 2000
"""Entries of a folder that bubblewrap can be told one by one."""

View = Literal["own", "hidden", "readable", "writable", "frozen"]
AS_WANTED: Mapping[View, tuple[View | None, ...]] = {
    "own": (),
    "hidden": ("own", "hidden"),
    "readable": (None, "readable", "writable"),
    "writable": ("writable",),
    "frozen": ("own", "hidden"),
}
"""Views of the folder around a path with which the path is seen as it should be; None: nothing was changed there."""


class Surroundings(Protocol):
    """Contains a child in some way."""

    def command(self) -> list[str]:
        """Returns the words before the command that runs inside."""
        ...


@dataclass(frozen=True, slots=True)
class Containment:
    """Says what a child does without.

    hidden: folders that it finds empty, and files that it cannot open, beside those with tokens of other programs.
    visible: files and folders of its code, which it sees wherever they lie.
    writable: folders outside that it may write. network: whether it has the network.
    runs: run directories that it does not see. It sees the folders around them and around other runs that are known
    as they were when it began, without keys, and none of the runs that begin there later.
    """

    hidden: tuple[str, ...] = ()
    visible: tuple[str, ...] = ()
    writable: tuple[str, ...] = ()
    network: bool = True
    runs: tuple[str, ...] = ()

    def command(self) -> list[str]:
        """Returns the words before the command that runs inside; raises SandboxError where bubblewrap is missing."""
        return [
            *(bubblewrap_path(WHAT, UNCONTAINED), "--unshare-user", "--unshare-pid", "--unshare-ipc"),
            *([] if self.network else ["--unshare-net"]),
            *("--die-with-parent", "--as-pid-1", "--cap-drop", "ALL", "--ro-bind", "/", "/"),
            *(*(PROC if os.geteuid() == 0 else PROC[:2]), "--dev", "/dev", *_gpus()),
            *_mounts(*self._views()),
            "--",
        ]

    def _views(self) -> tuple[dict[str, View], set[str]]:
        """Returns what the child sees at each path that is not as outside, where a later line outdoes one before, and
        the folders of runs."""
        secret, folders = secrets_of_runs(map(Path, self.runs))
        views: dict[str, View] = {}
        views |= {path: "readable" for path in _with_real_paths([*_own_code(), *self.visible])}
        views |= {path: "writable" for path in _with_real_paths(self.writable)}
        views |= {path: "own" for path in _shared_folders()}
        hidden = (*self.hidden, *self.runs, *secret, *token_paths(os.environ))
        frozen = {folder for folder in map(os.path.realpath, folders) if _can_freeze(folder)}
        return views | {os.path.realpath(path): "hidden" for path in hidden}, frozen


@dataclass(frozen=True, slots=True)
class WithoutNetwork:
    """Takes nothing but the network from a child that runs code of asyncrl only, and contains what it starts itself."""

    def command(self) -> list[str]:
        """Returns the words before the command that runs inside; raises SandboxError where bubblewrap is missing."""
        options = ("--unshare-user", "--unshare-net", "--die-with-parent", "--dev-bind", "/", "/", "--")
        return [bubblewrap_path(WHAT, UNCONTAINED), *options]


def _mounts(views: Mapping[str, View], frozen: Collection[str]) -> list[str]:
    """Returns the options for these paths: outer folders first, and none for a path that is to be read as it is."""
    words: list[str] = []
    sealed: list[str] = []  # Folders in memory: at the end, once what is seen inside has its place.
    made: dict[str, View] = {}
    for path in sorted({*views, *frozen}, key=lambda each: len(Path(each).parts)):
        around = next((made[str(each)] for each in Path(path).parents if str(each) in made), None)
        is_seen = path in views or around not in AS_WANTED["frozen"]
        view: View = "frozen" if views.get(path, "readable") == "readable" and path in frozen else views[path]
        if not os.path.exists(path) or (not is_seen if view == "frozen" else around in AS_WANTED[view]):
            continue
        made[path] = view
        match view:
            case "own":
                words += _own_folder(path)
            case "frozen":
                words += _entries(path)
                sealed += [path]
            case "hidden" if os.path.isdir(path):
                words += ["--tmpfs", path]
                sealed += [path]
            case "hidden":  # A device that cannot be opened, because mounts of bubblewrap have none.
                words += ["--ro-bind", os.devnull, path]
            case "readable" | "writable":
                words += ["--bind" if view == "writable" else "--ro-bind", os.path.realpath(path), path]
    return [*words, *(word for path in sealed for word in ("--remount-ro", path))]


def _entries(folder: str) -> list[str]:
    """Returns the options for a folder with the entries that it has now."""
    words = ["--tmpfs", folder]
    for entry in os.scandir(folder):
        kind = ("--symlink", os.readlink(entry)) if entry.is_symlink() else ("--ro-bind-try", entry.path)
        words += [*kind, entry.path]
    return words


def _can_freeze(folder: str) -> bool:
    """Returns whether the entries of a folder can be named one by one; those of the root have mounts of their own."""
    try:
        with os.scandir(folder) as entries:
            return folder != "/" and sum(1 for _ in islice(entries, MOST_ENTRIES + 1)) <= MOST_ENTRIES
    except OSError:
        return False


def _own_folder(path: str) -> list[str]:
    return ["--perms", "1777", "--size", str(LARGEST_FOLDER), "--tmpfs", path]


def _own_code() -> list[str]:
    """Returns the folders from which this Python imports, the current one, and the file that names hosts."""
    imported = (sys.prefix, sys.base_prefix, str(PACKAGE), *filter(None, sys.path))
    return [*imported, os.getcwd(), NAME_RESOLUTION]


def token_paths(environ: Mapping[str, str]) -> list[str]:
    """Returns where keys, tokens and passwords of other programs lie: in the usual places, and where variables of a
    worker say so."""
    paths = [os.path.expanduser(path) for path in TOKENS.split()]
    for variable, _, inner in (each.partition("/") for each in MOVED.split()):
        paths += [os.path.join(path, inner) for path in environ.get(variable, "").split(os.pathsep) if path]
    paths += [value for name, value in environ.items() if OF_SECRETS.search(name) and os.path.isabs(value)]
    needed = [*map(Path, (sys.executable, sys.prefix, sys.base_prefix, "/usr/lib")), Path.cwd(), PACKAGE]
    return [path for path in paths if not any(each.is_relative_to(os.path.realpath(path)) for each in needed)]


def _shared_folders() -> list[str]:
    return [os.path.realpath(path) for path in (*SHARED, tempfile.gettempdir()) if os.path.isdir(path)]


def _with_real_paths(paths: Iterable[str]) -> list[str]:
    """Returns absolute paths, each also as it is behind links."""
    whole = [os.path.abspath(path) for path in paths]
    return [*whole, *map(os.path.realpath, whole)]


@cache
def _gpus() -> tuple[str, ...]:
    devices = [str(path) for pattern in GPUS for path in sorted(Path("/").glob(pattern.lstrip("/")))]
    return tuple(word for device in devices for word in ("--dev-bind", device, device))


def exit_status(status: int) -> int:
    """Returns the status of a contained child as `Popen.returncode` has that of others: -N where signal N ended it."""
    return SIGNAL_STATUS - status if status > SIGNAL_STATUS else status


def try_containment(*layers: Surroundings) -> None:
    """Starts a contained child that ends at once; raises SandboxError with the reason if it cannot. layers: each inside
    the one before."""
    run_trial(
        [*(word for layer in layers for word in layer.command()), sys.executable, "-I", "-S", "-c", ""],
        os.environ,
        UNCONTAINED,
    )


def containment_of(
    config: "Config", named: Sequence[str], hidden: Sequence[str] = (), run_dir: Path | None = None
) -> Containment | None:
    """Returns what children with the user's code do without; None where the config contains nothing. named: names and
    commands of that code, whose files the children see. hidden: further paths, beside the run and those of secrets."""
    from asyncrl.config.sections.secret import secret_paths  # not where children import this: they do without pydantic

    section = config.children
    if section.sandbox == "none":
        return None
    secret = [os.path.abspath(os.path.expanduser(path)) for path in secret_paths(config)]
    found = dict.fromkeys((*hidden, *secret, *token_paths(os.environ)))
    runs = tuple(os.path.abspath(path) for path in (run_dir, RUNS_BY_DEFAULT) if path is not None)
    return Containment(tuple(found), files_named(named), section.writable, section.network, runs)


def files_named(texts: Sequence[str]) -> tuple[str, ...]:
    """Returns the files that texts such as `FILE.py:NAME` or a command name, and the folders of Python files."""
    words = [word for text in texts for word in text.replace(":", " ").split()]
    files = [os.path.abspath(os.path.expanduser(word)) for word in words]
    found = [path for path in files if os.path.isfile(path)]
    return (*found, *(os.path.dirname(path) for path in found if path.endswith(".py")))
