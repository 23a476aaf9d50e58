"""Pictures of the report's page for docs/report.md: `python -m support.pictures` in tests/ draws them anew.

From a job that the tests make up, so that anybody can; the same command on real files draws the same page.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from click.testing import CliRunner

from lastgasp.cli import main
from support.step_jobs import Shape, write

ASSETS = Path(__file__).parents[2] / "assets"
NAMES = ("report-steps.svg", "report-time.svg", "report-excess.svg")
_STYLE = re.compile(r"<style>(.*?)</style>", re.S)
_SVG = re.compile(r"<svg (.*?)>(.*?)</svg>", re.S)


def pictures() -> dict[str, str]:
    """Name -> drawing: the first ones of the page of a job whose rank 2 waits for its data from step 80 on."""
    with tempfile.TemporaryDirectory() as folder:
        job, page = Path(folder, "job"), Path(folder, "report.html")
        write(Shape(slow={2: {"data": 0.02}}, slow_from=80), 1, job)
        done = CliRunner().invoke(main, ["report", str(job), "--html", str(page)])
        assert done.exit_code == 0, done.output
        text = page.read_text()
    found = _STYLE.search(text)
    assert found
    style = found[1].replace("body{", "svg.page{")
    drawn = zip(NAMES, _SVG.findall(text), strict=False)
    return {name: _alone(attributes, inside, style) for name, (attributes, inside) in drawn}


def _alone(attributes: str, inside: str, style: str) -> str:
    space = "" if "xmlns=" in attributes else 'xmlns="http://www.w3.org/2000/svg" '
    back = '<rect width="100%" height="100%" fill="var(--bg)"/>'
    return f"<svg {space}{attributes}><style>{style}</style>{back}{inside}</svg>\n"


if __name__ == "__main__":
    for name, text in pictures().items():
        (ASSETS / name).write_text(text)
