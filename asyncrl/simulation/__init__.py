"""Runs the real controller on virtual time with fake services: schedules, and whole fleets with injected faults."""
