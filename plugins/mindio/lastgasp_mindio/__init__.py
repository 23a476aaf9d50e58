"""The drop-in `mindio_ttp`: MindIO TFT's names on lastgasp's embedded engine (docs/mindio-drop-in.md)."""
