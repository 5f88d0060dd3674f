"""Worker processes and the calls on them: start, connect, supervise, restart, stop."""
