"""Processes of the tests' jobs, forked from one that has imported torch and the frameworks already.

A launcher and its ranks spend most of their time on importing the same again and again. Here `subprocess.Popen` gets
what it would start from an image, a process that has imported it once: a child of the caller with its own command
line, environment, files, folder, session and signal dispositions, as `lastgasp.launch.warm_child` makes ranks of a
warm restart. What the image cannot stand in for is started as ever: another interpreter or program, another value of
a variable that was read while it imported. `@pytest.mark.cold` and TESTS_COLD=1 start everything as ever.
"""

from __future__ import annotations

from support.prefork.client import Prefork, installed

__all__ = ["Prefork", "images", "installed"]

images = Prefork()
"""Those of this process."""
