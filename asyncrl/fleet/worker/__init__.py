"""The inside of a worker process: its specification, its service, its compute thread."""
