"""Weights move from the trainer to the engines by a specification, leases on two slots, and memory that both map."""
