"""The one place that holds the version; hatchling reads it at build time."""

__version__ = "0.1.0"
