"""Calls to workers that run beside the training iteration: new weights, and rows that are no longer needed."""
