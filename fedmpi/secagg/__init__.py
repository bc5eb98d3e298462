"""Secure aggregation: fixed-point encoding of what is summed."""
