"""Fleets whose services only let time pass, in processes or on the virtual clock, under the real controller."""
