"""Predicts a run by running it: the real controller, gate and journal on virtual time, on modelled stages."""
