"""The formulas of reinforcement learning as pure functions, each with its source."""
