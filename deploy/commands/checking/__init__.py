"""Commands that check a machine, the needs of an experiment, or what a run left."""
