"""The staleness gate: which groups may be drawn and which samples train next. Pure logic."""
