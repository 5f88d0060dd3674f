"""Files that run inside a sandbox. The pool compiles them with the interpreter of the programs and passes the code in.
They import little, because each sandbox starts anew, and of asyncrl only each other: a sandbox cannot see it."""
