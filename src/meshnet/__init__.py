"""meshnet: one large language model over many machines, served as if it were one server."""

__version__ = "0.1.0"
