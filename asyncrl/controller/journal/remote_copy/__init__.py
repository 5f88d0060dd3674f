"""Copies a run to a store of objects after each checkpoint, and brings it back to a machine that does not have it."""
