"""Services whose replicas have several ranks: where they meet, and what they compute together."""
