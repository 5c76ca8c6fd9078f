"""Metrics: one module per task, with a function ``score_…`` and a dataclass ``…Score`` each."""
