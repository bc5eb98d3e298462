"""Data sets, their partition over parties, and the prepared files that ranks map."""
