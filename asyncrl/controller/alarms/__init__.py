"""Alarms report trouble once, or end the run: mistakes of an algorithm, crashes, failed rewards, policy mismatch."""
