"""Checkpoints of MindSpore and MindFormers: where they are and what can be read from them. Needs no MindSpore."""
