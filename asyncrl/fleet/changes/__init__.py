"""Changes of a fleet while it runs: more and fewer workers, and another incarnation of the run."""
