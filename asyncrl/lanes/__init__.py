"""How messages, rows and weights move between workers: one folder a lane."""
