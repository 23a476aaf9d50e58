"""The hooks on the real MindFormers and MindSpore, both versions: what is wrapped when, and what is not."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support.mindspore import place

ROOT = Path(__file__).parents[2]
CHILD = place.HERE / "hooks_child.py"
TRIGGERS = ["Trainer.finetune", "Trainer.train"]
PLAIN = ["Model.eval", "Model.fit", "Model.train"]
ALL = ["BaseTrainer.training_process", "GenerationMixin.generate", *PLAIN, *TRIGGERS]
REGISTRY = "registry.callback.LastGasp"
RUN_ARGUMENTS = ["callbacks", "epoch", "train_dataset"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def versions(*marks: pytest.MarkDecorator) -> pytest.MarkDecorator:
    """Both of them; the older one with more marks."""
    found = []
    for version in place.VERSIONS:
        skip = pytest.mark.skipif(bool(place.missing(version)), reason=place.missing(version))
        found.append(pytest.param(version, marks=[skip, *(marks if version == place.OLD else ())]))
    return pytest.mark.parametrize("version", found)


both_versions = versions(pytest.mark.full)


def told(version: str, case: str, folder: Path, flag: str | None = None) -> dict[str, Any]:
    """What the child found."""
    paths = [str(ROOT / path) for path in ("core", "plugins/mindformers", "tests")]
    own = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "GLOG_v": "3"}
    environ = {key: value for key, value in os.environ.items() if not key.startswith("LASTGASP")} | own
    environ |= {} if flag is None else {"LASTGASP": flag, "LASTGASP_DIR": str(folder / "d")}
    command = [str(place.python(version)), str(CHILD), case, str(folder)]
    done = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=250, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("TOLD ")]
    assert len(lines) == 1, done.stdout[-2000:] + done.stderr[-4000:]
    found: dict[str, Any] = json.loads(lines[0].removeprefix("TOLD "))
    return found


@both_versions
def test_off_nothing_differs(version: str, tmp_path: Path) -> None:
    found = told(version, "off", tmp_path, "0")
    assert found["installed"] == [False, False]
    assert [found[name] for name in ("waiting", "training", "after", "end", "notes")] == [[]] * 5
    assert found["trained"] == "Stop" and found["plain"]


@pytest.mark.full
@both_versions
def test_not_asked_for_nothing_differs_while_it_trains(version: str, tmp_path: Path) -> None:
    found = told(version, "quiet", tmp_path)
    assert found["installed"] == [True, True]
    assert found["waiting"] == TRIGGERS
    assert [found[name] for name in ("training", "end", "notes")] == [[], [], []]
    assert found["after"] == TRIGGERS, "for a second trainer"
    assert found["trained"] == "Stop" and found["plain"]


@both_versions
def test_the_flag_in_the_yaml_turns_everything_on(version: str, tmp_path: Path) -> None:
    found = told(version, "yaml", tmp_path)
    assert found["waiting"] == TRIGGERS
    assert found["training"] == sorted([*ALL, REGISTRY])
    assert found["notes"] == [["run", str(tmp_path)], ["steer", ["resume_training"]], ["end_early", "Stop"]]
    assert found["end"] == []


@both_versions
def test_a_second_trainer_is_not_told_to_load_what_the_first_one_has_saved(version: str, tmp_path: Path) -> None:
    found = told(version, "again", tmp_path)
    assert found["notes"] == [["run", str(tmp_path)], ["end_early", "Stop"]]


@pytest.mark.full
@both_versions
def test_so_does_a_callback_in_the_yaml(version: str, tmp_path: Path) -> None:
    found = told(version, "entry", tmp_path)
    assert found["training"] == sorted([*ALL, REGISTRY])
    assert found["entry"] == {"type": "LastGasp", "dir": str(tmp_path)}
    assert found["registered"] == "lastgasp_mindformers.callback"


@pytest.mark.full
@both_versions
def test_so_does_a_callback_made_by_hand(version: str, tmp_path: Path) -> None:
    found = told(version, "object", tmp_path)
    assert found["training"] == sorted([*ALL, REGISTRY])
    assert found["notes"][0] == ["run", str(tmp_path / "object")]


@pytest.mark.full
@both_versions
def test_the_environment_turns_plain_mindspore_on(version: str, tmp_path: Path) -> None:
    found = told(version, "plain", tmp_path, "1")
    assert set(PLAIN) <= set(found["waiting"])
    attach = ["attach", "list", RUN_ARGUMENTS]
    assert found["notes"][-3:] == [["run", str(tmp_path / "d")], attach, ["end_early", found["plain"]]]
    assert found["end"] == []


@both_versions
def test_another_version_is_an_error_that_says_so(version: str, tmp_path: Path) -> None:
    found = told(version, "drift", tmp_path)
    assert found["expected"].startswith("mindspore.train.model.Model.fit(epoch, train_dataset, callbacks")
    assert found["found"] == "no such function"
    assert f"mindformers {version}, mindspore 2." in found["message"]
