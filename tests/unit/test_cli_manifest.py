"""`lastgasp manifest`: what was written without lastgasp becomes verifiable, what is incomplete is refused."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any, Literal

import pytest
from click.testing import CliRunner

from lastgasp.checkpoint import Provenance, SingleFile, Staged, candidates, newest_good
from lastgasp.cli import main
from lastgasp.cli._layouts import PLAIN
from lastgasp.mindspore.layout import LEGACY, LegacyName
from lastgasp.pytorch import save
from lastgasp.testing import corrupt
from support.mindspore_files import state, write

NUMBER = b"0123456789abcdef" * 256


def iteration(directory: Path, step: int) -> Path:
    folder = directory / f"iter_{step:07d}" / "mp_rank_00"
    folder.mkdir(parents=True)
    for name in ("model_optim_rng.pt", "distrib_optim.pt"):
        with zipfile.ZipFile(folder / name, "w") as archive:
            archive.writestr("archive/data/0", NUMBER)
    return folder


def run(command: str, directory: Path) -> tuple[int, dict[str, tuple[str, str]]]:
    done = CliRunner().invoke(main, [command, str(directory), "--json"])
    document: dict[str, Any] = json.loads(done.output)
    rows = document["checkpoints"]
    return done.exit_code, {Path(r["path"]).name: (r["state"], r.get("reason", "")) for r in rows}


def test_checkpoints_of_both_kinds_get_manifests_once_and_verify(tmp_path: Path) -> None:
    iteration(tmp_path, 10)
    with zipfile.ZipFile(tmp_path / "step=7.ckpt", "w") as archive:
        archive.writestr("archive/data/0", NUMBER)
    assert run("verify", tmp_path)[0] == 1
    assert run("manifest", tmp_path) == (0, {"iter_0000010": ("written", ""), "step=7.ckpt": ("written", "")})
    assert run("verify", tmp_path) == (0, {"iter_0000010": ("good", ""), "step=7.ckpt": ("good", "")})
    assert run("manifest", tmp_path) == (0, {"iter_0000010": ("present", ""), "step=7.ckpt": ("present", "")})


def test_from_then_on_a_flipped_bit_is_seen(tmp_path: Path) -> None:
    folder = iteration(tmp_path, 10)
    (folder / "args.json").write_text("{}")
    assert run("manifest", tmp_path)[0] == 0
    corrupt.flip_bit(folder / "args.json", 0)
    assert run("verify", tmp_path) == (1, {"iter_0000010": ("damaged", "")})


def test_what_is_incomplete_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    iteration(tmp_path, 10)
    corrupt.flip_bit(iteration(tmp_path, 20) / "distrib_optim.pt", 2000)
    corrupt.truncate(iteration(tmp_path, 30) / "model_optim_rng.pt", 100)
    iteration(tmp_path, 40)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("30")
    code, rows = run("manifest", tmp_path)
    assert code == 1
    assert [state for state, _ in rows.values()] == ["refused", "refused", "refused", "written"]
    assert "says 30: its save was not finished" in rows["iter_0000040"][1]
    assert "mp_rank_00/model_optim_rng.pt: is not a complete file of torch.save" in rows["iter_0000030"][1]
    assert "archive/data/0 has a wrong checksum" in rows["iter_0000020"][1]
    assert len(list(tmp_path.glob("*.manifest.json"))) == 1


def test_sharded_files_without_their_index_and_short_safetensors_are_refused(tmp_path: Path) -> None:
    for name in ("iter_0000010", "a-step=5.dcp", "step=3.dcp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__0_0.distcp").write_bytes(NUMBER)
    (tmp_path / "step=3.dcp/.metadata").write_bytes(b"index")
    (tmp_path / "step=4.dcp").mkdir()
    for name in ("__0_0.distcp", "__0.metadata"):  # dcp.save(use_collectives=False)
        (tmp_path / "step=4.dcp" / name).write_bytes(NUMBER)
    for name, there in (("checkpoint-500", 100), ("checkpoint-400", 4000)):
        (tmp_path / name).mkdir()
        index = json.dumps({"weight": {"dtype": "F32", "shape": [1000], "data_offsets": [0, 4000]}}).encode()
        whole = len(index).to_bytes(8, "little") + index
        (tmp_path / name / "model.safetensors").write_bytes(whole + bytes(there))
    code, rows = run("manifest", tmp_path)
    assert code == 1
    assert [rows.pop(name) for name in ("step=3.dcp", "step=4.dcp", "checkpoint-400")] == [("written", "")] * 3
    assert [state for state, _ in rows.values()] == ["refused"] * 3
    assert "__0_0.distcp: no .metadata stands beside it" in rows["iter_0000010"][1]
    assert "no .metadata" in rows["a-step=5.dcp"][1]
    assert "model.safetensors: has" in rows["checkpoint-500"][1]


def test_what_lastgasp_itself_has_written_is_whole_without_its_manifest(tmp_path: Path) -> None:
    """Copied somewhere without it: such files carry no checksums of their own."""
    torch = pytest.importorskip("torch")
    save({"weight": torch.ones(3)}, tmp_path / "step-5.pt")
    manifest = tmp_path / "step-5.pt.manifest.json"
    manifest.unlink()
    assert run("manifest", tmp_path) == (0, {"step-5.pt": ("written", "")})
    corrupt.truncate(tmp_path / "step-5.pt", 50)
    manifest.unlink()
    assert "is not a complete file" in run("manifest", tmp_path)[1]["step-5.pt"][1]


def test_a_manifest_that_cannot_be_read_is_not_all_well(tmp_path: Path) -> None:
    iteration(tmp_path, 1)
    assert run("manifest", tmp_path)[0] == 0 and run("manifest", tmp_path)[0] == 0
    next(tmp_path.rglob("*manifest*")).write_text("{")
    assert run("manifest", tmp_path)[0] == 1


def plain(directory: Path, name: str, age_s: int = 0) -> Path:
    path = directory / name
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data/0", NUMBER + name.encode())
    now = path.stat().st_mtime_ns
    os.utime(path, ns=(now, now - age_s * 1_000_000_000))
    return path


def test_plain_files_with_and_without_a_step_in_their_names(tmp_path: Path) -> None:
    plain(tmp_path, "checkpoint-epoch12.pth.tar", 300)
    plain(tmp_path, "model_best.pt", 100)
    plain(tmp_path, "first.pth", 200)
    (tmp_path / "notes.txt").write_text("no checkpoint")
    (tmp_path / "model.bin").write_bytes(b"no checkpoint that anybody knows")
    code, rows = run("manifest", tmp_path)
    assert (code, list(rows)) == (0, ["checkpoint-epoch12.pth.tar", "model_best.pt", "first.pth"])
    assert set(rows.values()) == {("written", "")}
    # Among those without a step the one written last is the newest, whatever its name.
    assert list(run("verify", tmp_path)[1]) == ["checkpoint-epoch12.pth.tar", "model_best.pt", "first.pth"]
    found = newest_good([tmp_path], PLAIN)
    assert found is not None
    assert (found.path.name, found.step) == ("checkpoint-epoch12.pth.tar", 12)


@pytest.mark.parametrize("name", ["model.pt", "model.pth", "model.pth.tar"])
def test_plain_files_that_are_incomplete_are_refused(tmp_path: Path, name: str) -> None:
    corrupt.flip_bit(plain(tmp_path, name), 2000)
    code, rows = run("manifest", tmp_path)
    assert (code, rows[name][0]) == (1, "refused")
    assert "wrong checksum" in rows[name][1]
    corrupt.truncate(tmp_path / name, 50)
    assert "is not a complete file" in run("manifest", tmp_path)[1][name][1]
    corrupt.empty(tmp_path / name)
    assert run("manifest", tmp_path)[0] == 1
    assert run("verify", tmp_path) == (1, {name: ("no manifest", "")})


def test_files_of_the_format_before_torch_1_6_are_unverifiable_and_get_a_manifest(tmp_path: Path) -> None:
    (tmp_path / "old.pth").write_bytes(bytes.fromhex("80028a0a6cfc9c46f9206aa850192e") + b"\x80\x02M\xe9\x03.")
    assert run("manifest", tmp_path) == (0, {"old.pth": ("written", "")})


def test_a_file_with_a_manifest_is_seen_whatever_its_name(tmp_path: Path) -> None:
    plain(tmp_path, "model")
    with Staged(tmp_path / "best.weights", SingleFile()) as staged:
        staged.open().write(NUMBER)
        staged.publish(Provenance(format="pytorch", step=3, kind="periodic", job="j"))
    assert run("verify", tmp_path) == (0, {"best.weights": ("good", "")})
    corrupt.flip_bit(tmp_path / "best.weights", 7)
    assert run("verify", tmp_path) == (1, {"best.weights": ("damaged", "")})


@pytest.mark.parametrize("command", ["manifest", "verify"])
def test_an_empty_directory_is_wrong_use(command: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(main, [command, str(tmp_path)])
    assert done.exit_code == 2
    assert "iter_* directories" in done.output


@pytest.mark.parametrize("ext", ["ckpt", "safetensors"])
def test_mindformers_files_of_all_ranks_and_mindspores_own(ext: Literal["ckpt", "safetensors"], tmp_path: Path) -> None:
    for step in (4, 8, 9):
        for rank in range(1 if step == 9 else 2):  # the last save was not finished
            write(tmp_path / LegacyName("tiny", 1, step, ext).file(rank), state(step, 1))
    write(tmp_path / "net-2_3.ckpt", state(7, 2))
    cut = tmp_path / LegacyName("tiny", 1, 8, ext).file(1)
    corrupt.truncate(cut, cut.stat().st_size - 1)
    code, rows = run("manifest", tmp_path)
    assert code == 1
    assert rows[f"tiny_rank-1_4.{ext}"] == rows["net-2_3.ckpt"] == ("written", "")
    assert rows[f"tiny_rank-1_8.{ext}"][0] == "refused"
    assert "rank_1/tiny_rank_1-1_8" in rows[f"tiny_rank-1_8.{ext}"][1]
    why = "it has no file in rank_1: its save was not finished, or files were lost"
    assert rows[f"tiny_rank-1_9.{ext}"] == ("refused", why)
    _, rows = run("verify", tmp_path)
    assert {name: state for name, (state, _) in rows.items()} == {
        "net-2_3.ckpt": "good",
        f"tiny_rank-1_4.{ext}": "good",
        f"tiny_rank-1_8.{ext}": "no manifest",
        f"tiny_rank-1_9.{ext}": "no manifest",
    }
    found = candidates([tmp_path], LEGACY)
    assert [(c.step, c.manifest.world.world_size) for c in found if c.manifest is not None] == [(4, 2)]


def test_mindformers_newer_format(tmp_path: Path) -> None:
    for step in (4, 8):
        write(tmp_path / f"iteration_{step:08d}" / "tiny-model-0000000-0000001.safetensors", state(step, 1))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    code, rows = run("manifest", tmp_path)
    assert code == 1
    assert {name: state for name, (state, _) in rows.items()} == {
        "iteration_00000004": "written",
        "iteration_00000008": "refused",
    }
