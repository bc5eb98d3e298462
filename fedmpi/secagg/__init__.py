"""Secure aggregation: the two sides of a round as state machines, their messages, and the graph of who masks with whom."""
