"""The commands, functions of their arguments that return an exit code: `main` in the file of the command's name, or a
function of that name in the file of another one. The text that describes a command registers it."""
