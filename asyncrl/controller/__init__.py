"""The loop of a run: draw groups, roll them out, pick a batch, train, publish. Journal and gate belong to it."""
