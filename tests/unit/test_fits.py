"""Which fit of a script this is, and which checkpoints are of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from lastgasp.checkpoint import Candidate, FileEntry, Manifest, Provenance
from lastgasp.checkpoint.manifest import Fit, build, decode, encode
from lastgasp.checkpoint.samefit import differences, name_of_fit, of_fit
from lastgasp.checkpoint.writer import ManifestWriter
from lastgasp.errors import ConfigError
from lastgasp.fits import Fits, fingerprint
from lastgasp.topology import Place

GOLDEN = Path(__file__).parent.parent / "golden" / "manifest-v2.json"
HERE, THERE = Path("/a"), Path("/b")


class Model:
    """Something that is trained."""


def test_fits_are_numbered_by_directory() -> None:
    fits, models = Fits(), [Model(), Model()]
    assert [fits.begin(HERE, models[0]), fits.begin(THERE, models[1])] == [0, 0]
    fits.end(HERE)
    assert fits.begin(HERE, models[0]) == 1
    assert fits.coming(HERE) == 2


def test_a_fit_that_did_not_end_is_the_same_once_more_with_the_same_model_alone() -> None:
    fits, one, other = Fits(), Model(), Model()
    fits.begin(HERE, one)
    assert fits.interrupted(HERE)
    assert fits.begin(HERE, one) == 0
    assert fits.begin(HERE, other) == 1


def test_a_fit_whose_end_is_in_no_checkpoint_is_known() -> None:
    fits, model = Fits(), Model()
    assert fits.trains_again(HERE) is None
    fits.begin(HERE, model)
    assert fits.trains_again(HERE) is None
    fits.end(HERE, durable=False)
    assert fits.trains_again(HERE) == 0
    fits.begin(HERE, model)
    fits.end(HERE, durable=True)
    assert fits.trains_again(HERE) is None


def test_after_a_checkpoint_of_unknown_fit_no_further_fit_begins() -> None:
    fits, model = Fits(), Model()
    fits.begin(HERE, model)
    fits.resumed_unnumbered(HERE, Path("old.ckpt"))
    fits.refuse_unnumbered(HERE)
    fits.end(HERE)
    fits.begin(HERE, model)
    with pytest.raises(ConfigError, match=r"old\.ckpt"):
        fits.refuse_unnumbered(HERE)


def test_fingerprints_distinguish_rows() -> None:
    assert fingerprint(["a", "b"]) == fingerprint(iter(["a", "b"]))
    assert len({fingerprint(rows) for rows in (["ab"], ["a", "b"], ["b", "a"], [])}) == 4


def manifest(fit: Fit | msgspec.UnsetType) -> Manifest:
    entry = FileEntry(path="a.ckpt", size=3, xxh3_128="0" * 32, chunk_size=4, chunks=("1" * 32,))
    return build(Provenance(format="lightning", step=12, kind="gasp", job="sample", fit=fit), (entry,))


def test_what_does_not_say_its_fit_is_the_first_ones() -> None:
    paths = ["step=1.ckpt", "gasp-fit=2-step=1.ckpt", "fit=2-old.ckpt"]
    problems = [Candidate(Path(path), 1, None, "no manifest") for path in paths[:2]]
    found = [*problems, Candidate(Path(paths[2]), 1, manifest(msgspec.UNSET))]
    found += [Candidate(Path(f"{n}.ckpt"), 1, manifest(Fit(number=n))) for n in (0, 2)]
    assert [c.path.name for c in of_fit(found, 0)] == ["step=1.ckpt", "fit=2-old.ckpt", "0.ckpt"]
    assert [c.path.name for c in of_fit(found, 2)] == ["gasp-fit=2-step=1.ckpt", "2.ckpt"]
    assert of_fit(found, 1) == []
    assert (name_of_fit(0), name_of_fit(2)) == ("", "fit=2-")


def test_a_folder_may_be_shared_with_fits_of_other_directories(tmp_path: Path) -> None:
    """Those of a directory that is gone may have been moved here."""
    for name in ("a", "b", "shared"):
        (tmp_path / name).mkdir()
    homes: list[Any] = ["../a", "../b", "../gone", msgspec.UNSET]
    found = [
        Candidate(tmp_path / "shared" / f"{n}.ckpt", 1, manifest(Fit(number=0, home=home)))
        for n, home in enumerate(homes)
    ]
    assert [c.path.name for c in of_fit(found, 0, tmp_path / "a")] == ["0.ckpt", "2.ckpt", "3.ckpt"]


def test_a_manifest_says_where_its_fit_is_at_home_if_that_is_elsewhere(tmp_path: Path) -> None:
    place = Place(rank=0, world_size=1, replicas=((0,),), job="sample", attempt=0)
    writer = ManifestWriter("lightning", place, lambda: Fit(number=0), home=tmp_path / "a")
    homes = {}
    for folder in ("a", "shared"):
        fit = writer.provenance(1, "periodic", folder=tmp_path / folder).fit
        again = decode(encode(manifest(fit)))
        assert isinstance(again, Manifest) and again.fit == fit
        homes[folder] = (again.version, isinstance(fit, Fit) and fit.home)
    assert homes == {"a": (2, msgspec.UNSET), "shared": (3, "../a")}


def test_differences_name_what_differs() -> None:
    now = Fit(number=1, model="a" * 32, optimizer="b" * 32)
    assert differences(Path("x"), now, now) == differences(Path("x"), msgspec.UNSET, now) == []
    assert differences(Path("x"), Fit(number=1, model="a" * 32), now) == [], "what was not looked at is equal"
    lines = differences(Path("x"), Fit(number=0, model="c" * 32, data="d"), now)
    assert [line.split(" ")[0] for line in lines] == ["fit", "names,"]


def test_a_manifest_says_its_fit_in_version_2_and_nothing_in_version_1() -> None:
    plain, numbered = manifest(msgspec.UNSET), manifest(Fit(number=3, model="e" * 32))
    assert (plain.version, numbered.version) == (1, 2)
    assert b'"fit"' not in encode(plain)
    assert decode(encode(plain)) == plain
    assert decode(encode(numbered)) == numbered


def test_golden_file() -> None:
    found = decode(GOLDEN.read_bytes())
    assert isinstance(found, Manifest), found
    assert encode(found) == GOLDEN.read_bytes()
    assert found.fit == Fit(number=1, model="0" * 32, optimizer="1" * 32, data="")


def test_what_a_restart_trains_again_is_said() -> None:
    fits, model = Fits(), Model()
    fits.begin(HERE, model)
    assert fits.not_kept() == "", "it trains"
    fits.end(HERE, durable=True)
    assert fits.not_kept() == ""
    fits.begin(THERE, model)
    fits.end(THERE, durable=False)
    assert fits.not_kept().endswith("trains it again: /b (fit 0)")
