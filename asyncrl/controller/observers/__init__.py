"""Observers receive the events of the controller and make metrics, samples and evaluations of them."""
