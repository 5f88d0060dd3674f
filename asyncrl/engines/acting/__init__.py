"""Policies that act in environments: networks, PPO and SAC on transitions, and the stepping of environments."""
