"""What was called, outermost first."""

calls: list[str] = []
