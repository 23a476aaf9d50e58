"""PyTorch's process groups."""
