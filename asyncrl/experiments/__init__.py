"""The experiments of the package: TOML files whose first line describes them. Lists and reads them."""

import difflib
from importlib.resources import files

from asyncrl.errors import ConfigError

SUFFIX = ".toml"


def experiments() -> dict[str, str]:
    """Returns one-line descriptions by name."""
    found = [entry for entry in files(__name__).iterdir() if entry.name.endswith(SUFFIX)]
    return {
        entry.name.removesuffix(SUFFIX): _description(entry.read_text(encoding="utf-8"))
        for entry in sorted(found, key=lambda entry: entry.name.removesuffix(SUFFIX))
    }


def experiment_text(name: str) -> str:
    """Returns the TOML of the experiment `name`.

    Raises:
        ConfigError: there is no experiment of that name; the message lists the existing names.
    """
    resource = files(__name__) / f"{name}{SUFFIX}"
    if not resource.is_file():
        names = list(experiments())
        near = difflib.get_close_matches(name, names, 1)
        others = f"there are {', '.join(names)}, or give a file ending in {SUFFIX}"
        raise ConfigError(f"there is no experiment {name!r}; {f'did you mean {near[0]}?' if near else others}")
    return resource.read_text(encoding="utf-8")


def _description(text: str) -> str:
    first = text.partition("\n")[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""
