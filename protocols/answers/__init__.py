"""How a text that a model wrote is read: its characters and words, and the JSON objects in it."""
