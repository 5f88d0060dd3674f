"""The ranks of a trainer: where they find each other, and what they exchange."""
