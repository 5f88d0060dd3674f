"""Services that compute nothing: they spend time, and keep the promises that the real services keep.

The same fakes serve the schedule simulator and unit tests, which call them directly on virtual time; the fault
simulator, which runs them in simulated workers; the overhead benchmark and the runs without torch, which run them in
real worker processes. A subclass changes durations, rows, faults and what is observed.
"""
