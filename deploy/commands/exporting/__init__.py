"""Commands that hand the model of a run to others."""
