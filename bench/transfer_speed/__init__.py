"""Measures messages and batches between processes, beside limits of the machine and other systems."""
