"""The commands, functions of their arguments that return an exit code: `main` in the file of its name; of those that
share a file, cli.py has the names."""
