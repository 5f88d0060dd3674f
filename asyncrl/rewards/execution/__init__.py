"""Runs reward functions: in child processes that can be killed, or in the process of the caller."""
