"""Moves messages, rows and weights between workers: one folder a lane."""
