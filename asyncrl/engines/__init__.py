"""What computes: one file an engine, behind one small interface for generation and one for training."""
