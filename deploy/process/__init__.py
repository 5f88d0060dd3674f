"""Processes on this machine: the launcher, the main of a worker and signals."""
