"""Keeps what crossed the lanes of a worker, in order, so that `asyncrl replay` can give it to its service again."""
