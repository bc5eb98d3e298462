"""Image classification: models, training phases, one file per method."""
