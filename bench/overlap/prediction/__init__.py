"""Commands that predict a job before it runs: map, whatif, advise and validate."""
