"""Wire types: the only place where node and tracker meet."""

PROTOCOL_VERSION = 1
"""Raised whenever a message changes its meaning; unlike versions are refused at join."""
