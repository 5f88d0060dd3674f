"""Sends what a run measures to monitoring systems, each an optional extra."""
