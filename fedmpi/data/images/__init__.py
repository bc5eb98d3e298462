"""Image data sets: where they come from, which party holds which images, and the prepared files."""
