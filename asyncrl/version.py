"""The version of asyncrl, in a file that imports nothing: hellos and `asyncrl --version` name it."""

__version__ = "0.1.0"
