"""`_lastgasp_boot.pth`: what it costs a Python that has no use for it, and what it does where MindSpore is imported."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from support.places import without_places

pytestmark = pytest.mark.named
ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "plugins/mindformers"
OURS = "print([m for m in sys.modules if 'lastgasp' in m], sys.meta_path[0].__class__.__name__);"


class Site:
    """A Python whose start-up reads our `.pth`, and that finds what this one finds."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, symlinks=True)
        self.packages = next((folder / "lib").glob("python*/site-packages"))
        self.python = folder / "bin/python"
        for name in ("_lastgasp_boot.py", "_lastgasp_boot.pth"):
            shutil.copy(PLUGIN / name, self.packages)
        found = [ROOT / "core", PLUGIN, *(path for path in sys.path if path.endswith("site-packages"))]
        (self.packages / "others.pth").write_text("".join(f"{path}\n" for path in found))

    def add(self, name: str, text: str = "") -> None:
        """A package of that name."""
        (self.packages / name).mkdir()
        (self.packages / name / "__init__.py").write_text(text)

    def run(self, code: str, flag: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run it; `flag` is LASTGASP."""
        environ = {"PATH": "/usr/bin:/bin"} | ({} if flag is None else {"LASTGASP": flag})
        command = [str(self.python), "-c", f"import sys;{code}"]
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200, check=False)

    def says(self, code: str, flag: str | None = None) -> str:
        """What it prints; it must not fail or complain."""
        done = self.run(code, flag)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        return done.stdout.strip()


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "env")


def test_a_python_that_starts_loads_one_small_module(site: Site) -> None:
    assert site.says(OURS) == "['_lastgasp_boot'] _Watch"
    assert site.says(OURS, "1") == "['_lastgasp_boot'] _Watch"
    assert "_Watch" not in site.says(OURS, "0")
    added = site.says("import json; print(len(sys.modules))")
    for name in ("_lastgasp_boot.py", "_lastgasp_boot.pth"):
        (site.packages / name).unlink()
    assert int(added) - int(site.says("import json; print(len(sys.modules))")) == 1


def test_looking_for_mindspore_loads_nothing(site: Site) -> None:
    assert site.says(f"import importlib.util as u; assert u.find_spec('mindspore') is None;{OURS}").startswith(
        "['_lastgasp_boot']"
    )
    site.add("mindspore")
    assert site.says(f"import importlib.util as u; u.find_spec('mindspore').loader;{OURS}").startswith(
        "['_lastgasp_boot']"
    )
    assert site.says(f"import json, email, http.client, xml.dom;{OURS}").startswith("['_lastgasp_boot']")


def test_importing_mindspore_installs_the_plugin_and_leaves_no_trace_in_it(site: Site) -> None:
    site.add("mindspore", "name = __name__")
    kinds = "print(type(m.__loader__).__name__, type(m.__spec__.loader).__name__, m.name)"
    plain = site.says(f"import mindspore as m;{kinds}", "0")
    assert plain == "SourceFileLoader SourceFileLoader mindspore"
    assert site.says(f"import mindspore as m;{kinds}") == plain
    loaded = site.says(f"import mindspore;{OURS}")
    assert "'lastgasp_mindformers.installation'" in loaded and "_Watch" not in loaded
    assert "lastgasp" not in site.says(f"import mindspore;{OURS}", "0").replace("'_lastgasp_boot'", "")
    for other in ("torch", "lastgasp_lightning", "lastgasp_megatron", "lastgasp_mindformers.run"):
        assert site.says(f"import mindspore; print({other!r} in sys.modules)") == "False"


def test_a_missing_mindspore_is_missing_as_before(site: Site) -> None:
    done = site.run("import mindspore")
    assert "ModuleNotFoundError: No module named 'mindspore'" in done.stderr
    assert "lastgasp" not in without_places(done.stderr, site.packages)


def test_finders_of_the_old_kind_are_passed_over_as_python_does(site: Site) -> None:
    """Such as those of six before 1.16, which other packages bring along."""
    old = "sys.meta_path.append(type('Old', (), {'find_module': lambda *_: None})());"
    assert site.says(f"{old}import importlib.util as u; print(u.find_spec('mindspore'))") == "None"


def test_a_mindspore_that_cannot_be_imported_fails_as_before(site: Site) -> None:
    site.add("mindspore", "1 / 0")
    done = site.run("import mindspore")
    assert "ZeroDivisionError" in done.stderr
    twice = "try:\n  import mindspore\nexcept ZeroDivisionError:\n  pass\n"
    assert "_Watch" in site.says(f"\n{twice}{twice}{OURS}"), "it waits for a later attempt"


def test_what_goes_wrong_in_the_plugin_stops_only_jobs_that_asked_for_it(site: Site) -> None:
    site.add("mindspore")
    (site.packages / "others.pth").write_text("")  # no lastgasp_mindformers any more
    done = site.run("import mindspore; print('goes on')")
    assert done.returncode == 0 and done.stdout == "goes on\n"
    assert "lastgasp: MindSpore jobs of this process are not protected: ModuleNotFoundError" in done.stderr
    done = site.run("import mindspore", "1")
    assert done.returncode == 1 and "No module named 'lastgasp_mindformers'" in done.stderr


def test_a_wrong_switch_is_refused_where_mindspore_is_imported(site: Site) -> None:
    site.add("mindspore")
    assert site.says("print('not used')", "yes") == "not used"
    done = site.run("import mindspore", "yes")
    assert done.returncode == 1 and "LASTGASP='yes' is not allowed: expected 1 (on) or 0 (off)" in done.stderr


def test_import_of_the_plugin_without_mindspore_names_the_extra(site: Site) -> None:
    if importlib.util.find_spec("mindspore") is not None:
        pytest.skip("MindSpore is installed here")
    done = site.run("import lastgasp_mindformers")
    assert "MissingExtra: mindspore is not installed" in done.stderr
    assert "pip install -e '.[mindformers]'" in done.stderr
