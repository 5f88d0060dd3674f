"""Bounds rewards, of functions and of environments."""

LARGEST_REWARD = 1e30
"""Sums and squares of a step's rewards stay finite, and each fits into a float32."""
