"""Reads a config from file, environment, flags and Python, and compares it at a resume."""

from asyncrl.config.sources.load_config import Loaded, load, read

__all__ = ["Loaded", "load", "read"]
