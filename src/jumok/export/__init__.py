"""Models in the formats of other tools."""
