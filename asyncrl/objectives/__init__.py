"""Advantages, losses, corrections and KL: pure functions, each with the source of its formula."""
