"""A hand-written training loop: `lastgasp.pytorch.Session` and what it is made of."""
