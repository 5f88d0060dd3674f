"""The data lane: rows stay with the worker that made them, and readers copy them by reference."""
