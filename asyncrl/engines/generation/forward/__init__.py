"""The forward pass of the generation engine over a flat row of tokens, with its own paged KV cache."""
