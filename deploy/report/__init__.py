"""The report of a run as one HTML file: curves, timeline, samples, evaluations, audit and configuration."""
