"""The metrics of a training step, computed from sums over tokens and ranks."""
