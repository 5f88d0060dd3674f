"""Views of runs: the report as one HTML file, and the dashboard that shows them live."""
