"""The attention core: scores, masks, weights, and the fast paths. Imports nothing of jumok but its errors."""
