"""Selection of the transport of weights from where trainer and generation are, and both of its ends."""
