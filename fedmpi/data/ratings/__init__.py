"""Rating data sets: where they come from, which ratings a party trains on, and the prepared files."""
