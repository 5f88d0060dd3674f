"""The algorithms: each is two async functions, `roll_out` and `train`, over the services of a fleet."""
