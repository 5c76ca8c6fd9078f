"""The models: one system a file, its config beside it. Imports nothing of jumok but attention and batch."""
