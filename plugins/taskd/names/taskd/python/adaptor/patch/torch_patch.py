"""TaskD replaces methods of torch's agent here; lastgasp's agent is put in place by its own entry point."""

__all__ = ["patch_torch_method"]


def patch_torch_method() -> None:
    """Nothing is left to do."""
