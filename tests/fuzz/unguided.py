"""Targets without coverage to be guided by: torch is not installed beside the fuzzer, and libzmq is not Python."""

UNGUIDED = ("weights", "port")
