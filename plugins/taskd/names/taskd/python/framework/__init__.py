"""Worker, manager and agent."""
