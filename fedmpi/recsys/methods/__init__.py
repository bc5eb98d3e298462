"""One file per rating method."""
