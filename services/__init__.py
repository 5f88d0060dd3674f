"""The services of a fleet, one file each: generation, reward, reference, training."""

if __name__ != "asyncrl.services":
    raise ImportError("import asyncrl.services, not services: the folder is mounted in the package by a link")
