"""Measuring a model against other engines: same inputs, same dtype, parity before any time.

Nothing here imports torch before it is asked for work: see `contest` for the whole of it.
"""
