"""Finds, checks and tests the code in an answer of a policy; whatever runs or is parsed, is so in a sandbox."""
