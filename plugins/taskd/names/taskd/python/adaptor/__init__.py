"""What adapts the frameworks."""
