"""Says of a finished run how much its services overlapped, what held it up, and what would change that."""
