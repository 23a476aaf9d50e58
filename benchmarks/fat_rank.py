"""A rank of tests/support/engine_worker.py that holds `ballast` bytes where it is the victim."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from support.engine_worker import main

if __name__ == "__main__":
    logging.getLogger("lastgasp").setLevel(logging.ERROR)  # that it was saved is what is being measured
    options = json.loads(sys.argv[1])
    fat = options["rank"] == options["victim"]
    # Written, not only reserved: the kernel has to free every page.
    ballast = bytearray(b"\1") * (options["ballast"] if fat else 0)
    main()
