"""What a run leaves behind: files and the terminal."""
