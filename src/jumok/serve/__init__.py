"""HTTP server for trained models: see :mod:`.app`."""
