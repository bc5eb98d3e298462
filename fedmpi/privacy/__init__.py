"""Mechanisms (what noise is added) and the accountant (what it proves)."""
