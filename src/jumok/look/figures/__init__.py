"""Static figures."""
