"""Commands that help to write an experiment."""
