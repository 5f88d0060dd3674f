"""Environments of other packages, one file a package; each imports its package when its first episode begins."""
