"""Models with layers of experts: what is recorded of their routers, and how recorded choices are replayed."""
