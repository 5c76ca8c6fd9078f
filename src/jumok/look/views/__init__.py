"""Statistics and maps of captured attention."""
