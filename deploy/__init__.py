"""Starts runs: the command line, the local launcher, the worker process."""

if __name__ != "asyncrl.deploy":
    raise ImportError("import asyncrl.deploy, not deploy: the folder is mounted in the package by a link")
