"""The ranks of a replica, which compute with slices of one model: the first one leads, the others follow."""
