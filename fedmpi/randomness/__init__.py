"""Every random draw of a run, by what it is for: seeded, or keyed by the operating system. Known to every room."""
