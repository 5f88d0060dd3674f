"""The file with the spaces of an environment, in the folder of a policy."""

import json
from pathlib import Path

from asyncrl.engines.acting.stepping.spaces import Spaces
from asyncrl.errors import ConfigError

SPACES = "spaces.json"


def write_spaces(path: Path, spaces: Spaces) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(spaces.plain()) + "\n")


def read_spaces(folder: Path) -> Spaces:
    """Reads the spaces of the policy in a folder; raises ConfigError where the file is damaged."""
    path = folder / SPACES
    try:
        return Spaces.of(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} does not have the spaces of an environment: {error}; start the run anew") from error
