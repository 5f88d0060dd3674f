"""Files of the controller for workers on other hosts, by digest."""
