"""Stand-in."""

__version__ = "0.12.1-standin"
