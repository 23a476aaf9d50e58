"""The switch and the settings: YAML, callback entry, environment, and which beats which."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from lastgasp.errors import ConfigError
from lastgasp.options import DEFAULT_ATTEMPTS, Options
from lastgasp_mindformers.settings import answered_by, options_of_config


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the shell of the tests has set."""
    for name in [name for name in os.environ if name.startswith("LASTGASP")]:
        monkeypatch.delenv(name)


ENTRY = {"type": "LastGasp", "dir": "/e", "keep": 7}
OTHER = {"type": "CheckpointMonitor", "directory": "x"}


@pytest.mark.parametrize(
    ("variable", "config", "on"),
    [
        ("", {}, False),
        ("", {"lastgasp": None}, False),
        ("", {"lastgasp": {}}, False),
        ("", {"lastgasp": {"dir": "/d"}}, False),
        ("", {"lastgasp": {"enable": False}}, False),
        ("", {"lastgasp": {"enable": True}}, True),
        ("", {"callbacks": [OTHER]}, False),
        ("", {"callbacks": [OTHER, ENTRY]}, True),
        ("", {"callbacks": ENTRY}, True),
        ("", {"callbacks": [ENTRY], "lastgasp": {"enable": False}}, False),
        ("1", {}, True),
        ("1", {"lastgasp": {"enable": False}}, True),
        ("0", {"lastgasp": {"enable": True}, "callbacks": [ENTRY]}, False),
    ],
)
def test_what_turns_it_on(monkeypatch: pytest.MonkeyPatch, variable: str, config: dict[str, Any], on: bool) -> None:
    monkeypatch.setenv("LASTGASP", variable)
    assert (options_of_config(config) is not None) is on


@pytest.mark.parametrize(
    ("config", "variable", "directory"),
    [
        ({}, None, Path("output").absolute()),
        ({"output_dir": "/out"}, None, Path("/out")),
        ({"output_dir": "/out"}, "/env", Path("/env")),
        ({"output_dir": "/out", "lastgasp": {"dir": "/yaml"}}, "/env", Path("/yaml")),
        ({"output_dir": "/out", "callbacks": [ENTRY]}, "/env", Path("/e")),
        ({"callbacks": [ENTRY], "lastgasp": {"enable": True, "dir": "/yaml"}}, None, Path("/yaml")),
    ],
)
def test_where_it_goes(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], variable: str | None, directory: Path
) -> None:
    monkeypatch.setenv("LASTGASP", "1")
    if variable:
        monkeypatch.setenv("LASTGASP_DIR", variable)
    options = options_of_config(config)
    assert options is not None and options.gasp.directory == directory


def test_settings_of_section_and_entry_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    section = {"enable": True, "attempts": 2, "marks": "step", "sha256": True, "recovery": "save"}
    monkeypatch.setenv("LASTGASP_KEEP", "9")
    monkeypatch.setenv("LASTGASP_SAVE_TIMEOUT", "5")
    options = options_of_config({"lastgasp": section, "callbacks": [ENTRY]})
    assert options is not None
    assert (options.gasp.keep, options.gasp.save_timeout, options.gasp.sha256) == (7, 5.0, True)
    assert (options.attempts, options.require_manifest, options.recovery) == (2, False, "save")


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"lastgasp": True}, "lastgasp"),
        ({"lastgasp": {"enable": "yes"}}, "lastgasp.enable"),
        ({"lastgasp": {"enable": True, "directory": "/d"}}, "lastgasp.directory"),
        ({"lastgasp": {"enable": True, "attempts": 0}}, "attempts"),
        ({"lastgasp": {"enable": True, "recovery": "never"}}, "recovery"),
        ({"callbacks": [{"type": "LastGasp", "keeep": 1}]}, "lastgasp.keeep"),
    ],
)
def test_what_is_wrong_in_the_yaml_is_refused(config: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        options_of_config(config)
    assert caught.value.field == field


def test_arguments_beat_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LASTGASP_ATTEMPTS", "3")
    monkeypatch.setenv("LASTGASP_REQUIRE_MANIFEST", "1")
    assert Options.resolve("/d").attempts == 3 and Options.resolve("/d").require_manifest
    assert Options.resolve("/d", attempts=4).attempts == 4
    assert not Options.resolve("/d", require_manifest=False).require_manifest
    monkeypatch.delenv("LASTGASP_ATTEMPTS")
    assert Options.resolve("/d").attempts == DEFAULT_ATTEMPTS
    with pytest.raises(ConfigError, match="keeep"):
        Options.resolve("/d", keeep=1)
    with pytest.raises(ConfigError, match="dir"):
        Options.resolve()


def test_a_wrong_switch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LASTGASP", "yes")
    with pytest.raises(ConfigError, match="LASTGASP"):
        options_of_config({})


@pytest.mark.parametrize(
    ("asked", "answered", "told"),
    [(None, "", False), ("restart", "restart", False), ("save", "save", False), ("auto", "", True)],
)
def test_what_cannot_be_done_in_place_is_said(
    asked: str | None, answered: str, told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if asked is not None:
        monkeypatch.setenv("LASTGASP_RECOVERY", asked)
    assert answered_by(Options.resolve("/d").recovery, 0) == answered
    assert ("the job restarts" in caplog.text) is told
    assert answered_by(asked, 1) == answered and caplog.text.count("the job restarts") == told
