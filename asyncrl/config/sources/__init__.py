"""Reads a config from file, environment, flags and Python, writes it, and compares it at a resume.

layers ──> loading ──> Config;  keys, aliases.toml: names of keys;  toml: writes a config;  resume: allowed changes
"""

from asyncrl.config.sources.load_config import Loaded, load, read

__all__ = ["Loaded", "load", "read"]
