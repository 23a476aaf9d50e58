"""The switch file: TaskD's JSON as five independent bits, and everything that may be wrong with it."""

from __future__ import annotations

import json
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastgasp.steps import bits, switchfile
from lastgasp.steps.bits import ALL, COMM, DATALOADER, DEFAULT_ON, FORWARD, SAVE, STEP
from lastgasp.steps.switchfile import SwitchFile, switch_path

ON = dict.fromkeys(bits.TASKD, "on")
OFF = dict.fromkeys(bits.TASKD, "off")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A path where there is no file yet."""
    return tmp_path / "profilingSwitch"


def write(path: Path, content: object) -> None:
    """Text as it is, anything else as JSON."""
    path.write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.mark.parametrize(
    ("content", "mask"),
    [
        (ON, ALL),
        (OFF, 0),
        (ON | {"CommunicationOperator": "off"}, None),  # what is on already
        (OFF | {"CommunicationOperator": "on"}, COMM),
        (OFF | {"Step": "on"}, STEP),
        (OFF | {"SaveCheckpoint": "on"}, SAVE),
        (OFF | {"FP": "on"}, FORWARD),
        (OFF | {"DataLoader": "on"}, DATALOADER),
        ({"Step": "off"}, DEFAULT_ON & ~STEP),
        ({"CommunicationOperator": "on"}, ALL),
        ({}, None),
        ({"FP": "off", "Communication": "on"}, DEFAULT_ON & ~FORWARD),  # the wrong name in TaskD's documentation
        ('\n {"FP" :\t"off"}\n', DEFAULT_ON & ~FORWARD),
        ('{"FP": "on", "FP": "off"}', DEFAULT_ON & ~FORWARD),
    ],
)
def test_five_keys_five_bits(file: Path, content: object, mask: int | None) -> None:
    write(file, content)
    assert SwitchFile(file).poll() == mask


@given(st.integers(0, ALL), st.dictionaries(st.sampled_from(sorted(bits.TASKD)), st.sampled_from(["on", "off"])))
def test_what_it_says_holds_and_the_rest_stays(before: int, said: dict[str, str]) -> None:
    checked = SwitchFile(Path("/nowhere"))._checked(dict[str, object](said))
    after = switchfile._applied(checked, before)
    for key, bit in bits.TASKD.items():
        assert bool(after & bit) == (said[key] == "on" if key in said else bool(before & bit))


BAD: list[tuple[object, str]] = [
    ("", "not JSON"),
    ('{"Step": "of', "not JSON"),
    ('{"Step": "on"} x', "not JSON"),
    ("[" * 100_000, "not JSON"),
    ('"on"', "a JSON str, not an object with the keys CommunicationOperator, Step, "),
    ("[]", "a JSON list"),
    ("null", "a JSON NoneType"),
    (OFF | {"Step": "ON"}, "Step='ON' in it is not allowed: expected 'on' or 'off'"),
    (OFF | {"Step": True}, "Step=True in it is not allowed"),
    (OFF | {"Step": None}, "Step=None"),
    (OFF | {"FP": ["on"]}, r"FP=\['on'\]"),
    (OFF | {"DataLoader": "x" * 500}, r"DataLoader='x{36}\.\.\. in it"),
    (json.dumps(OFF) + " " * switchfile.SIZE_LIMIT, "longer than 1048576 bytes"),
]


@pytest.mark.parametrize(("content", "words"), BAD, ids=[words[:30] for _, words in BAD])
def test_a_bad_file_keeps_the_last_state_and_is_one_warning(
    file: Path, caplog: pytest.LogCaptureFixture, content: object, words: str
) -> None:
    switch = SwitchFile(file)
    write(file, {"Step": "off"})
    assert switch.poll() == DEFAULT_ON & ~STEP
    write(file, content)
    with caplog.at_level(logging.WARNING, "lastgasp.steps"):
        assert [switch.poll() for _ in range(5)] == [None] * 5
    [record] = caplog.records
    assert str(file) in record.getMessage()
    assert "the marks stay as they are (forward dataloader save)" in record.getMessage()
    caplog.clear()
    assert_message(record.getMessage(), words)
    write(file, OFF)
    assert switch.poll() == 0


def assert_message(text: str, words: str) -> None:
    """`words` is a regular expression."""
    with pytest.raises(ValueError, match=words):
        raise ValueError(text)


def test_bytes_that_are_no_text(file: Path) -> None:
    file.write_bytes(b'{"Step": "\xff\xfe"}')
    assert SwitchFile(file).poll() is None


def test_the_limit_itself_is_read(file: Path) -> None:
    text = json.dumps(OFF)
    write(file, text + " " * (switchfile.SIZE_LIMIT - len(text)))
    assert SwitchFile(file).poll() == 0


def a_pipe(path: Path) -> None:
    """Nobody writes into it: an open that waits would wait for ever."""
    os.mkfifo(path)


def a_directory(path: Path) -> None:
    """In the file's place, as Kubernetes makes one where a file to mount is missing."""
    path.mkdir()


def a_device(path: Path) -> None:
    """Without end."""
    path.symlink_to("/dev/zero")


def a_circle(path: Path) -> None:
    """A symlink to itself."""
    path.symlink_to(path)


def a_socket(path: Path) -> None:
    """It cannot be opened at all."""
    os.mknod(path, stat.S_IFSOCK | 0o600)  # bind() takes short paths only


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (a_pipe, "a named pipe, not a regular file"),
        (a_directory, "a directory"),
        (a_device, "a device"),
        (a_circle, "cannot be read"),
        (a_socket, "a socket"),
    ],
)
def test_what_is_not_a_file_never_blocks(
    file: Path, caplog: pytest.LogCaptureFixture, make: Callable[[Path], None], words: str
) -> None:
    make(file)
    switch = SwitchFile(file)
    with caplog.at_level(logging.WARNING, "lastgasp.steps"):
        assert [switch.poll() for _ in range(3)] == [None] * 3
    [record] = caplog.records
    assert_message(record.getMessage(), words)


def test_a_file_that_turns_into_a_pipe_between_look_and_open(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(file)
    looks: list[os.stat_result] = []

    def looked(found: os.stat_result) -> None:
        looks.append(found)
        if len(looks) == 2:
            raise switchfile._Refused("seen after the open")

    monkeypatch.setattr(switchfile, "_must_be_regular", looked)
    assert SwitchFile(file).poll() is None
    assert [stat.S_ISFIFO(found.st_mode) for found in looks] == [True, True]


def test_a_file_that_the_user_may_not_read(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(file, OFF)

    def refused(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    switch = SwitchFile(file)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "lastgasp.steps"):
        patch.setattr(switchfile, "_content", refused)
        assert switch.poll() is None
    assert "it cannot be read (Permission denied)" in caplog.text
    assert switch.poll() == 0


def test_a_missing_file_is_no_problem(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    switch = SwitchFile(file / "below" / "nothing")
    with caplog.at_level(logging.INFO, "lastgasp.steps"):
        assert switch.poll() is None
    assert caplog.records == []


def test_a_file_that_goes_and_comes_back_keeps_the_last_state(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    switch = SwitchFile(file)
    with caplog.at_level(logging.INFO, "lastgasp.steps"):
        write(file, OFF)
        assert switch.poll() == 0
        file.unlink()
        assert [switch.poll(), switch.poll()] == [None, None]
        write(file, OFF)
        assert switch.poll() is None
        write(file, ON)
        assert switch.poll() == ALL
    assert [word in caplog.text for word in ("is read every second", "is gone: the marks stay")] == [True, True]


def test_unknown_keys_are_reported_once_and_do_no_harm(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    switch = SwitchFile(file)
    with caplog.at_level(logging.WARNING, "lastgasp.steps"):
        write(file, OFF | {"Communication": "on"})
        assert switch.poll() == 0
        write(file, ON | {"Communication": "on"})
        assert switch.poll() == ALL
    [record] = caplog.records
    assert "its keys 'Communication' are unknown" in record.getMessage()
    assert "CommunicationOperator" in record.getMessage()


def test_warnings_end_for_a_file_with_ever_new_problems(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    switch = SwitchFile(file)
    with caplog.at_level(logging.WARNING, "lastgasp.steps"):
        for i in range(100):
            write(file, {"Step": f"wrong {i}"})
            assert switch.poll() is None
    assert len(caplog.records) == 32
    assert "further problems of this file are not logged" in caplog.records[-1].getMessage()


# -- who changed last ------------------------------------------------------------------------------


def test_a_command_holds_until_the_file_says_something_else(file: Path) -> None:
    switch = SwitchFile(file)
    write(file, OFF)
    assert switch.poll(DEFAULT_ON) == 0
    assert switch.poll(COMM) is None  # lastgasp switch comm=on
    write(file, json.dumps(OFF, indent=2))  # the same, written anew
    assert switch.poll(COMM) is None
    write(file, OFF | {"Step": "on"})
    assert switch.poll(COMM) == STEP


def test_a_missing_key_keeps_what_a_command_has_set(file: Path) -> None:
    switch = SwitchFile(file)
    write(file, {"Step": "off"})
    assert switch.poll(COMM | STEP) == COMM


def test_a_file_that_agrees_with_a_command_changes_nothing(file: Path) -> None:
    switch = SwitchFile(file)
    write(file, OFF)
    assert switch.poll(0) is None


# -- which file ------------------------------------------------------------------------------------


def test_a_mounted_config_map(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Kubernetes: file -> ..data/file, ..data -> ..2026_11_21; an update replaces ..data."""
    for version, content in (("..1", OFF), ("..2", ON)):
        (tmp_path / version).mkdir()
        write(tmp_path / version / "profilingSwitch", content)
    data, file = tmp_path / "..data", tmp_path / "profilingSwitch"
    data.symlink_to("..1")
    file.symlink_to("..data/profilingSwitch")
    switch = SwitchFile(file)
    with caplog.at_level(logging.INFO, "lastgasp.steps"):
        assert switch.poll() == 0
        (tmp_path / "..new").symlink_to("..2")
        (tmp_path / "..new").rename(data)
        assert switch.poll() == ALL
    told = [record for record in caplog.records if "symlink" in record.getMessage()]
    assert [record.levelname for record in told] == ["INFO"]
    assert "TaskD would refuse it" in told[0].getMessage()


def test_the_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LASTGASP_SWITCH_FILE", raising=False)
    assert str(switch_path()) == "/user/cluster-info/datatrace-config/profilingSwitch"
    monkeypatch.setenv("LASTGASP_SWITCH_FILE", "")
    assert switch_path() == switchfile.DEFAULT_PATH
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LASTGASP_SWITCH_FILE", "here")
    assert switch_path() == tmp_path / "here"
    assert SwitchFile().path == tmp_path / "here"
