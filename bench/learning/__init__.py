"""Does it learn? A declared grid of runs and the report made from them."""
