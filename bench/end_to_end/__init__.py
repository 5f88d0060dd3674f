"""Measures trained tokens per second, end to end, beside TRL."""
