"""`lastgasp manifest`: what was written without lastgasp becomes verifiable, what is not whole is refused."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lastgasp.cli import main
from lastgasp.testing import corrupt

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


def test_what_is_not_whole_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    iteration(tmp_path, 10)
    corrupt.flip_bit(iteration(tmp_path, 20) / "distrib_optim.pt", 2000)
    corrupt.truncate(iteration(tmp_path, 30) / "model_optim_rng.pt", 100)
    iteration(tmp_path, 40)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("30")
    code, rows = run("manifest", tmp_path)
    assert code == 1
    assert [state for state, _ in rows.values()] == ["refused", "refused", "refused", "written"]
    assert "says 30: its save was not finished" in rows["iter_0000040"][1]
    assert "mp_rank_00/model_optim_rng.pt: is no whole file of torch.save" in rows["iter_0000030"][1]
    assert "archive/data/0 has a wrong checksum" in rows["iter_0000020"][1]
    assert len(list(tmp_path.glob("*.manifest.json"))) == 1


@pytest.mark.parametrize("command", ["manifest", "verify"])
def test_an_empty_directory_is_wrong_use(command: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(main, [command, str(tmp_path)])
    assert done.exit_code == 2
    assert "iter_* directories" in done.output
