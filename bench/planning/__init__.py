"""Plans jobs on GPUs that one may not have, and holds the plans against published rows."""
