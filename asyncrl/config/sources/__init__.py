"""Reads a config from file, environment, flags and Python, writes it, and compares it at a resume.

layers (one a source) ──> load_config ──> Config
value_errors: messages about values;  keys, aliases.toml: names of keys;  resume: allowed changes
"""

from asyncrl.config.sources.load_config import Loaded, load, read

__all__ = ["Loaded", "load", "read"]
