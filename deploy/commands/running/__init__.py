"""Commands about a run that goes on."""
