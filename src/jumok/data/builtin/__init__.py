"""Generated data sets that need no download."""
