"""Where a config comes from: file, environment, flags and Python over one another; and what a resume may change of it.

layers ──> loading ──> Config;  keys, foreign_names: what is called how;  toml: written down;  changes: at a resume
"""

from asyncrl.settings.loading import Loaded, load, read

__all__ = ["Loaded", "load", "read"]
