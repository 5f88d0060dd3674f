"""Checks that are made before a run starts: memory, open files, devices, installed packages."""
