"""Names of settings."""
