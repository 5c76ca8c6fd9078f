"""Question answering: the span of a context that answers a question."""
