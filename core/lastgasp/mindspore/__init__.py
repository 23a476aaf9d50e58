"""Checkpoints of MindSpore and MindFormers: where they lie and what they tell by themselves. Needs no MindSpore."""
