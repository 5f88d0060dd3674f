"""Implements the services of a fleet, one per file."""

if __name__ != "asyncrl.services":
    raise ImportError("import asyncrl.services, not services: the folder is mounted in the package by a link")
