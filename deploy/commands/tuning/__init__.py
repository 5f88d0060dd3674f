"""`asyncrl tune`: a search over config keys with short runs, of which the better ones go on."""
