"""The ways to compute attention. :mod:`jumok.attention.dispatch` chooses one for each call.

Each path has a function that returns why it cannot compute a call (None if it can) and one that computes it.
"""

NOT_APPLICABLE = ""  # the reason of a path that is meant for other calls; explanations omit it
NO_KEYS_REASON = "there is nothing to attend to"
