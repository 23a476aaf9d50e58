"""`lastgasp verify`: states, exit codes, file and byte range of a damage."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lastgasp.checkpoint import DirectoryLayout, Provenance, SingleFile, Staged, candidates, quarantine
from lastgasp.checkpoint.moving import set_aside
from lastgasp.cli import main
from lastgasp.events import Incident, encode_incident
from lastgasp.testing.corrupt import flip_bit


def publish(directory: Path, step: int, nbytes: int = 4096) -> Path:
    path = directory / f"step={step}.ckpt"
    with Staged(path, SingleFile()) as staged:
        staged.open().write(bytes(range(256)) * (nbytes // 256))
        staged.publish(Provenance(format="test", step=step, kind="periodic", job="j"))
    return path


def run(directory: Path, *options: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["verify", str(directory), *options])
    return done.exit_code, done.output


def run_json(directory: Path) -> tuple[int, dict[str, Any]]:
    code, output = run(directory, "--json")
    document: dict[str, Any] = json.loads(output)
    return code, document


def test_all_good_is_zero_and_newest_first(tmp_path: Path) -> None:
    for step in (10, 20):
        publish(tmp_path, step)
    code, document = run_json(tmp_path)
    assert code == 0
    assert [(row["step"], row["state"], row["damages"]) for row in document["checkpoints"]] == [
        (20, "good", []),
        (10, "good", []),
    ]
    assert run(tmp_path)[0] == 0


def test_a_job_that_has_saved_nothing_yet_is_told_where_its_step_is(tmp_path: Path) -> None:
    """After a fault that was answered in place there may be an incident, and no checkpoint."""
    found = Incident(id="1", job="j", attempt=0, world_size=2, ending="in_place", step_saved=20, rung="replace")
    (tmp_path / "incidents").mkdir()
    (tmp_path / "incidents/20261127-1.json").write_bytes(encode_incident(found))
    code, text = run(tmp_path)
    said = " ".join(text.split())
    assert (code, "this job has saved none yet" in said, "step 20 is held in memory" in said) == (2, True, True), said
    (tmp_path / "incidents/20261127-1.json").write_bytes(b"{")
    assert "nothing that can be read" in " ".join(run(tmp_path)[1].split())


def test_a_flipped_bit_is_named_with_file_and_range(tmp_path: Path) -> None:
    publish(tmp_path, 10)
    flip_bit(publish(tmp_path, 20), 3000)
    code, document = run_json(tmp_path)
    assert code == 1
    newest, older = document["checkpoints"]
    (damage,) = newest["damages"]
    assert (newest["state"], older["state"]) == ("damaged", "good")
    assert damage["file"] == "step=20.ckpt"
    assert damage["begin"] <= 3000 < damage["end"]
    code, text = run(tmp_path)
    assert code == 1
    assert f"step=20.ckpt bytes {damage['begin']}-{damage['end']}" in text


def test_one_without_a_manifest_is_not_good(tmp_path: Path) -> None:
    (tmp_path / "epoch=0-step=5.ckpt").write_bytes(b"plain Lightning")
    code, document = run_json(tmp_path)
    assert code == 1
    assert [(row["step"], row["state"]) for row in document["checkpoints"]] == [(5, "no manifest")]
    assert "`lastgasp manifest DIR` gives them one" in run(tmp_path)[1]


def test_weights_beside_a_framework_s_checkpoints_are_none(tmp_path: Path) -> None:
    """Unless lastgasp has written them, or they are all that there is."""
    (tmp_path / "final.pt").write_bytes(b"exported")
    assert run_json(tmp_path)[1]["checkpoints"][0]["state"] == "no manifest"
    publish(tmp_path, 10)
    code, document = run_json(tmp_path)
    assert (code, [row["step"] for row in document["checkpoints"]]) == (0, [10])
    (tmp_path / "final.pt.manifest.json").write_bytes(b"torn")
    assert run_json(tmp_path)[0] == 1


@pytest.mark.parametrize("suffix", ["dcp", "zero"])
def test_directories_of_a_loop_are_read(suffix: str, tmp_path: Path) -> None:
    """Of sharded models and of DeepSpeed; weights that the user has put beside them are none."""
    for step in (12, 24):
        path = tmp_path / f"gasp-step={step:08d}.{suffix}"
        with Staged(path, DirectoryLayout(f"*.{suffix}")) as staged:
            staged.open(f"{path.name}/part").write(bytes(4096))
            staged.publish(Provenance(format="test", step=step, kind="gasp", job="j"))
    (tmp_path / "final.pt").write_bytes(b"exported")
    flip_bit(path / "part", 3000)
    code, document = run_json(tmp_path)
    assert code == 1
    assert [(row["step"], row["state"]) for row in document["checkpoints"]] == [(24, "damaged"), (12, "good")]


def test_a_manifest_of_a_newer_version_is_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "step=00000005.pt"
    with Staged(path, SingleFile(".pt")) as staged:
        staged.open().write(b"x" * 100)
        staged.publish(Provenance(format="test", step=5, kind="gasp", job="j"))
    (tmp_path / "final.pt").write_bytes(b"exported")
    manifest = tmp_path / f"{path.name}.manifest.json"
    manifest.write_text(re.sub('"version": [0-9]', '"version": 9', manifest.read_text(), count=1))
    code, document = run_json(tmp_path)
    assert (code, [row["state"] for row in document["checkpoints"]]) == (1, ["unreadable"])


def test_quarantined_ones_are_listed_and_do_not_count(tmp_path: Path) -> None:
    publish(tmp_path, 10)
    publish(tmp_path, 20)
    quarantine(candidates([tmp_path], SingleFile())[0], ["bit rot"], proven=True)
    code, document = run_json(tmp_path)
    assert code == 0
    assert any("step=20.ckpt.corrupt" in path for path in document["quarantined"])
    assert "moved away earlier" in run(tmp_path)[1]


def test_what_was_set_aside_is_listed_and_does_not_count(tmp_path: Path) -> None:
    publish(tmp_path, 10)
    publish(tmp_path, 20)
    home = set_aside(candidates([tmp_path], SingleFile())[0].path, SingleFile())
    code, document = run_json(tmp_path)
    assert (code, document["set_aside"]) == (0, [str(home)])
    assert [row["step"] for row in document["checkpoints"]] == [10]
    assert home.name in run(tmp_path)[1].replace("\n", "")


@pytest.mark.parametrize("name", ["", "nowhere"])
def test_nothing_to_look_at_is_two(name: str, tmp_path: Path) -> None:
    assert run(tmp_path / name)[0] == 2


def test_markup_in_names_is_text(tmp_path: Path) -> None:
    (tmp_path / "[red]step=5.ckpt").write_bytes(b"x")
    assert "[red]step=5.ckpt" in run(tmp_path)[1]


def test_a_folder_that_is_none_is_no_matter(tmp_path: Path) -> None:
    """Folders with a number in their names are looked into, as ranks may have files there; this one leads to itself."""
    publish(tmp_path, 10)
    (tmp_path / "of_2024").symlink_to("of_2024")
    assert run(tmp_path)[0] == 0
