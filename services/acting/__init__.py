"""The services of a run whose policy acts: generation, evaluation and training."""
