"""Whole episodes of a policy that acts."""
