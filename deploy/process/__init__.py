"""Processes on this machine: the launcher, the main of a worker, signals and restarts."""
