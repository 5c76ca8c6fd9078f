"""Models behind an HTTP API: see :mod:`.app`."""
