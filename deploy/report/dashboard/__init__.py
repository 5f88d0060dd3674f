"""The dashboard: what runs do, live in a browser on this machine."""
