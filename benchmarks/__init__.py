"""One script per claim. Each takes --json FILE for its raw rows and names the machine it ran on."""
