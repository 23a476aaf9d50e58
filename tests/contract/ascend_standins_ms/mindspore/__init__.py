"""Stands where mindio_ttp looks for MindSpore; the contract suite of the gasp needs nothing of it."""
