"""`python -m lastgasp`: the command line, where the script `lastgasp` is not on the path."""

from __future__ import annotations

from lastgasp.cli import main

main(prog_name="lastgasp")
