"""The manager."""
