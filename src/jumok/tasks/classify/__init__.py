"""Text classification, of single texts and of pairs."""
