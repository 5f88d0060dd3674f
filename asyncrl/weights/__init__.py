"""Weights from the trainer to the engines: a specification, leases on two slots, and memory that both sides map."""
