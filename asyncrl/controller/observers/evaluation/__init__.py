"""Evaluates versions on sets of held-out prompts beside training."""
