"""The sections of a config, each group of keys that belong together in a file of its own."""
