"""The things that processes exchange: contracts, transfer protocols, layouts, batches and wire messages; and how the
texts in them are read."""

if __name__ != "asyncrl.protocols":
    raise ImportError("import asyncrl.protocols, not protocols: the folder is mounted in the package by a link")
