"""Where the tests run must not matter."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from support.surroundings import scrub

ROOT = Path(__file__).parents[2]


def test_variables_of_other_jobs_proxies_and_terminals_are_taken_away() -> None:
    mine = {"PATH": "/bin", "HOME": "/root", "LASTGASP_WARM": "on", "TESTS_COLD": "1", "PYTHONPATH": "/x", "LANG": "C"}
    others = {"RANK": "3", "SLURM_NTASKS": "8", "LASTGASP": "1", "LASTGASP_DIR": "/d", "PET_A": "2", "MS_ROLE": "a",
              "HTTP_PROXY": "http://p", "https_proxy": "http://p", "FORCE_COLOR": "1", "COLUMNS": "40"}  # fmt: skip
    environ = mine | others
    scrub(environ)
    assert environ == mine


def test_settings_of_python_and_pytest_do_not_reach_the_tests() -> None:
    others = {"PYTEST_ADDOPTS": "-x", "PYTHONOPTIMIZE": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONWARNINGS": "error"}
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "--no-print-directory", "--eval", "variables:;@env", "variables"]
    done = subprocess.run(
        command, cwd=ROOT, env=environ | others, stdout=subprocess.PIPE, text=True, timeout=100, check=True
    )
    assert not [line for line in done.stdout.splitlines() if line.startswith(tuple(others))]
