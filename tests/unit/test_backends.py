"""Which backend is chosen, and that nothing of MindCluster's is touched by it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lastgasp import backends
from lastgasp.backends import Probe, choose_backend
from lastgasp.backends.embedded import EmbeddedBackend
from lastgasp.config import GaspConfig
from lastgasp.errors import ConfigError
from lastgasp.events import Incident, decode_incident, encode_incident
from lastgasp.session import Session
from lastgasp.topology import Place, data_parallel
from support.fake_controller import FakeSource

SITE = Path("/site")
MINDIO = {"mindio_ttp": SITE / "mindio_ttp", "torch_npu": SITE / "torch_npu"}


def diagnosis(places: dict[str, Path]) -> backends.Find:
    """An import system that has these."""
    return places.get


@pytest.fixture
def cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A /dev with two NPUs."""
    for name in ("davinci0", "davinci1", "davinci_manager"):
        (tmp_path / name).touch()
    monkeypatch.setattr(backends, "_NPU_DEVICES", tmp_path)
    return tmp_path


def test_embedded_looks_for_nothing() -> None:
    choice = choose_backend({"LASTGASP_BACKEND": "embedded"}, diagnosis(MINDIO))
    assert (choice.backend, choice.attempts) == ("embedded", ())
    assert choice.describe() == "backend embedded (LASTGASP_BACKEND=embedded)"


@pytest.mark.parametrize("text", ["", "auto", " AUTO "])
def test_auto_without_mindio_is_embedded_and_says_what_it_tried(text: str) -> None:
    choice = choose_backend({"LASTGASP_BACKEND": text}, diagnosis({}))
    assert choice.backend == "embedded"
    assert [attempt.name for attempt in choice.attempts] == ["mindio_ttp", "taskd"]
    assert "mindio_ttp: not installed" in choice.describe()


def test_auto_takes_ascend_where_everything_is_there(cards: Path) -> None:
    choice = choose_backend({}, diagnosis(MINDIO))
    assert choice.backend == "ascend"
    assert [(attempt.name, attempt.found) for attempt in choice.attempts] == [
        ("mindio_ttp", True), ("torch_npu", True), ("NPU", True), ("taskd", False),
    ]  # fmt: skip
    assert "2 in" in choice.attempts[2].why


def test_auto_without_a_card_is_embedded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_NPU_DEVICES", tmp_path)
    choice = choose_backend({}, diagnosis(MINDIO))
    assert choice.backend == "embedded"
    assert not choice.found("NPU")


def test_ascend_asks_for_no_card() -> None:
    assert choose_backend({"LASTGASP_BACKEND": "ascend"}, diagnosis(MINDIO)).backend == "ascend"


@pytest.mark.parametrize(
    ("places", "env", "missing"),
    [
        ({}, {}, "mindio_ttp: not installed"),
        ({"mindio_ttp": SITE}, {}, "torch_npu: not installed"),
        (MINDIO, {"MINDIO_FOR_MINDSPORE": "true"}, "mindspore: not installed"),
    ],
)
def test_ascend_names_what_is_missing(places: dict[str, Path], env: dict[str, str], missing: str) -> None:
    with pytest.raises(ConfigError, match="LASTGASP_BACKEND='ascend'") as caught:
        choose_backend({"LASTGASP_BACKEND": "ascend", **env}, diagnosis(places))
    assert missing in str(caught.value)


def test_another_value_is_refused() -> None:
    with pytest.raises(ConfigError, match="one of embedded, ascend, auto"):
        choose_backend({"LASTGASP_BACKEND": "mindio"}, diagnosis({}))


def test_the_unrelated_taskd_of_pypi_is_named(tmp_path: Path) -> None:
    (tmp_path / "taskd").mkdir()
    choice = choose_backend({}, diagnosis({"taskd": tmp_path / "taskd"}))
    assert not choice.found("taskd")
    assert "the unrelated project of that name from PyPI" in choice.describe()


def test_the_real_taskd_is_known(tmp_path: Path) -> None:
    for folder in ("api", "python/cython_api"):
        (tmp_path / folder).mkdir(parents=True)
    choice = choose_backend({}, diagnosis({"taskd": tmp_path}))
    assert choice.attempts[-1] == Probe("taskd", True, f"in {tmp_path}")


def test_off_ascend_nothing_of_it_is_imported(tmp_path: Path) -> None:
    """The complete life of a Session: its construction, a step, a save and the end."""
    code = """
import json, sys
from pathlib import Path
from lastgasp.config import GaspConfig
from lastgasp.session import Session
from lastgasp.topology import Place, data_parallel
from support.fake_controller import FakeSource
place = Place(rank=0, world_size=1, replicas=data_parallel(1))
session = Session(GaspConfig.resolve(sys.argv[1]), place, FakeSource(), None)
session.training_started(0, 0)
session.before_update(); session.step_completed(1)
assert session.fault("exception", "ValueError").ending == "saved"
session.close()
print(json.dumps([session.backend.backend, sorted(sys.modules)]))
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True, env=env)
    backend, loaded = json.loads(done.stdout.splitlines()[-1])
    assert backend == "embedded"
    foreign = ("mindio_ttp", "taskd", "torch_npu", "mindspore", "acl")
    assert [
        name for name in loaded if name.startswith("lastgasp.backends.ascend") or name.partition(".")[0] in foreign
    ] == []


def test_off_ascend_the_launcher_imports_nothing_of_it() -> None:
    code = """
import sys
from lastgasp.cli._ascend import helpers_running, prepared_here, start_anew_if_needed
import lastgasp.cli.run, lastgasp.launch.main
prepared = prepared_here()
start_anew_if_needed(prepared, [])
with helpers_running(prepared):
    print(sorted(name for name in sys.modules if name.startswith("lastgasp.backends.ascend") or
                 name.partition(".")[0] in ("mindio_ttp", "taskd", "torch_npu", "mindspore", "acl")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_record_names_its_backend_and_older_ones_can_be_read() -> None:
    incident = Incident(id="1", job="j", attempt=0, world_size=2, backend="mindio", led_by="MindIO")
    assert decode_incident(encode_incident(incident)) == incident
    old = {key: value for key, value in json.loads(encode_incident(incident)).items() if key != "backend"}
    assert decode_incident(json.dumps(old).encode()).backend == "embedded"


def test_with_the_embedded_engine_the_hot_path_is_the_status_words_own(tmp_path: Path) -> None:
    place = Place(rank=0, world_size=1, replicas=data_parallel(1))
    session = Session(GaspConfig.resolve(tmp_path), place, FakeSource(), None)
    try:
        session.training_started(0, 0)
        session.step_completed(1)
        assert (session.before_update, session.step_completed) == (
            session.status.before_update,
            session.status.step_completed,
        )
        assert isinstance(session._backend, EmbeddedBackend)
    finally:
        session.close()
