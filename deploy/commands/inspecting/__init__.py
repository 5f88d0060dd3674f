"""Commands that show what an experiment is, and start nothing."""
