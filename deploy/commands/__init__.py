"""One file a command: `main(arguments) -> exit code`."""
