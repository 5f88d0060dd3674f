"""The generation engine, which samples completions."""
