"""Ranks that hold or compute one model together: their groups, and the parts of the model that each has."""
