"""Custom training loops: `lastgasp.pytorch.Session` and its parts."""
