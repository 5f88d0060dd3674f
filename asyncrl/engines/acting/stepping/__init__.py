"""Steps environments in child processes that can be killed: the child's side, and the worker's."""
