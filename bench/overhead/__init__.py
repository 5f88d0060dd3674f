"""Measures what the runtime costs beside stages that only sleep."""
