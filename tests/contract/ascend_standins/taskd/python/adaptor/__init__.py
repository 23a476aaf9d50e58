"""As the real package has it."""
