"""Compares synchronous, one-step-off and asynchronous runs of one experiment, in turn on one machine."""
