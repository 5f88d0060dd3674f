"""Starts the hosts of a run on machines that somebody else schedules."""
