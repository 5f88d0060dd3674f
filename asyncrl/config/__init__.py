"""The experiment: its schema, its presets, and the rules that its values keep together. Imports no torch."""
