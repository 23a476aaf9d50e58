"""MindIO TFT's names on lastgasp's embedded engine, for code that was written for MindIO (docs/mindio-drop-in.md).

Raises ImportError where the real package is installed: two packages of one name would take turns.
"""

from __future__ import annotations

from lastgasp_mindio.shadow import refuse_beside_the_real_one

refuse_beside_the_real_one(__file__)
