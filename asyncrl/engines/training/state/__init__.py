"""The state of a trainer: models with their heads, optimizer, data-parallel ranks, and the files of a checkpoint."""
