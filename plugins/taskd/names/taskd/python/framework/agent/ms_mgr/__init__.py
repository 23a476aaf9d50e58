"""msrun's plugin."""
