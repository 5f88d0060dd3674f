"""Measurements of `asyncrl-bench`, each beside its physical limit."""

if __name__ != "asyncrl.bench":
    raise ImportError("import asyncrl.bench, not bench: the folder is mounted in the package by a link")
