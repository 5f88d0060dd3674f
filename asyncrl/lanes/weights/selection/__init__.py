"""The transport of each reader, opened."""
