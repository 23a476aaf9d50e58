"""How checkpoints of MindFormers and MindSpore are found, judged, verified and taken (`adapter.SelectionPolicy`)."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from lastgasp.adapter import CheckpointError, ConfigError, Gather, Layout, Options, Place, Preload, SelectionPolicy
from lastgasp.adapter.checkpoint import Agreement, Candidate, Verdict
from lastgasp.adapter.files import remove_stale_temps
from lastgasp.adapter.mindspore import ITERATIONS, LegacyName, decode_aux, layout_of, probe
from lastgasp_mindformers import begun
from lastgasp_mindformers.base import Base
from lastgasp_mindformers.listing import CheckpointCatalog, catalog_of
from lastgasp_mindformers.manifests import AUX_SUFFIX
from lastgasp_mindformers.named import owner_of
from lastgasp_mindformers.tracker import repair_meta, repair_tracker

log = logging.getLogger("lastgasp")

_LOST, _ENCODED = msgspec.json.Decoder(dict[str, str]), msgspec.json.encode


class MindFormersPolicy(SelectionPolicy):
    """One selection.

    Args:
        options: what the user asked for.
        catalog: where checkpoints are looked for.
        note: reports what people must know about the selected one.
        named: the checkpoint that MindFormers' own options name; None where they name none.
        given: the user has named weights to begin with, and unknown files may be these.
        preload: what reads this rank's file ahead, while it is verified; None verifies first.

    Attributes:
        resumed: completed updates of the selected checkpoint; None where none was.
        aux: this rank's auxiliary state in it; empty where there is none.
    """

    missing_manifest = "require_manifest"
    one_disk = True

    def __init__(
        self,
        options: Options,
        place: Place,
        catalog: CheckpointCatalog,
        note: Callable[[str], None],
        *,
        named: Path | None = None,
        given: bool = False,
        preload: Preload | None = None,
    ) -> None:
        super().__init__(options.gasp, place, catalog.folders, ITERATIONS, note=note)
        self._options, self._catalog, self._named, self._given, self.preload = options, catalog, named, given, preload
        self.resumed: int | None = None
        self.aux = b""

    def layout_of(self, path: Path) -> Layout:
        """From its name."""
        return layout_of(path)

    def tidy(self) -> None:
        """On rank 0: finish or remove what killed processes have left."""
        for folder in self.folders:
            remove_stale_temps(folder)
        self._catalog.put_back()

    # -- listing ----------------------------------------------------------------------------------

    def asked(self) -> Path | None:
        """What `resume` names, before what MindFormers' own options name."""
        if self.config.resume not in ("auto", "never"):
            return owner_of(Path(self.config.resume).absolute(), self._catalog)
        return self._named

    def candidates(self, own: bool) -> list[Candidate]:
        """Those of the catalog, newest first."""
        found = self._catalog.all()
        return [c for c in found if c.manifest is not None and c.manifest.job == self.place.job] if own else found

    def shortlist(self, found: list[Candidate]) -> list[Candidate]:
        """No more than `attempts` are read; further ones are listed."""
        untried, limit = [c for c in found if c.problem is None], self._options.attempts
        late = {c.path for c in untried[limit:]}
        why = f"was not tried: {limit} newer ones were. Set attempts to try more"
        return [dataclasses.replace(c, problem=why) if c.path in late else c for c in found]

    def named(self, path: Path) -> Candidate:
        """As the catalog judges it. Raises ConfigError: it is not there."""
        there = dataclasses.replace(
            self._catalog, places=[(path.parent, layout_of(path))], apart=frozenset(), base=None
        )
        found = next((c for c in there.all() if c.path == path), None)
        if found is None:
            remedy = "Look at `lastgasp verify` of its directory."
            raise ConfigError("resume or resume_training", str(path), "'auto', 'never' or a checkpoint", remedy)
        return found

    def verify(self, candidate: Candidate) -> Verdict:
        """This rank's share; what a rank of a plain training is going to load it verifies itself, while it loads it."""
        if candidate.manifest is None:
            return probe(candidate.path, layout_of(candidate.path), candidate.step, self.local)
        return super().verify(candidate)

    # -- taking -----------------------------------------------------------------------------------

    def selected(self, candidate: Candidate, by_name: bool) -> None:
        """Record the selected one; on rank 0 repair the files that name it to MindFormers."""
        super().selected(candidate, by_name)
        assert candidate.step is not None
        self.resumed, self.aux = candidate.step, self._aux_of(candidate)
        begun.finished(self.config.directory)
        name = LegacyName.parse(candidate.path.name)
        if self.place.rank != 0:
            return
        log.info("resuming after step %d of %s", candidate.step, candidate.path)
        if name is not None:
            repair_meta(candidate.path.parent, name, range(self.place.world_size))
        elif layout_of(candidate.path) is ITERATIONS:
            repair_tracker(candidate.path.parent, candidate.step)

    def _aux_of(self, candidate: Candidate) -> bytes:
        """This rank's auxiliary state, if the manifest covers its file."""
        directory = candidate.path.is_dir()
        path = candidate.path / AUX_SUFFIX if directory else candidate.path.with_name(f"{candidate.path.name}.small")
        named = path.relative_to(candidate.path.parent).as_posix()
        if candidate.manifest is None or named not in {entry.path for entry in candidate.manifest.files}:
            return b""
        try:
            return decode_aux(path.read_bytes()).get(self.place.rank, b"")
        except (OSError, CheckpointError) as error:
            log.warning("the random state in %s could not be read, and is not restored: %s", path, error)
            return b""

    # -- from scratch -----------------------------------------------------------------------------

    def lost(self, agreement: Agreement, gather: Gather) -> dict[str, str]:
        """What training from scratch would lose, as found by any rank: none begins while another one refuses."""
        lost = {path: "; ".join(why) for path, why in agreement.rejected.items()}
        unfinished = all(self._catalog.never_finished(c) for c in self._catalog.all())
        if not agreement.listed:
            lost = self._catalog.lost() or ({} if self._given else self._catalog.unknown())
        mine = bool(lost) and unfinished and begun.exists(self.config.directory)
        if all(gather("select/unfinished", b"1" if mine else b"")):
            log.warning("this job began from scratch, and no save of it was finished: training begins from scratch")
            return {}
        told = [_LOST.decode(payload) for payload in gather("select/lost", _ENCODED(lost))]
        return {path: why for one in told for path, why in one.items()}

    def begins_from_scratch(self) -> None:
        """Log it and record it."""
        if self.place.rank == 0:
            if not self.left_unused() and not self._catalog.others():  # else the caller says what they are
                where = ", ".join(map(str, self.folders))
                log.info("no checkpoint in %s: training begins from scratch", where)
            begun.begin(self.config.directory, self.place.job)

    def begins_over(self) -> None:
        """As requested; recorded as well."""
        super().begins_over()
        if self.place.rank == 0:
            begun.begin(self.config.directory, self.place.job)

    def left_unused(self) -> list[str]:
        """Checkpoints and files of training that are there, newest first."""
        return [*(str(c.path) for c in self._catalog.all()), *self._catalog.unknown()]


def catalog_for(
    places: list[tuple[Path, Layout]],
    options: Options,
    place: Place,
    apart: Iterable[tuple[str, str]] = (),
    base: Base | None = None,
) -> CheckpointCatalog:
    """Where this job looks, and which files there are no checkpoints of it."""
    return catalog_of(places, place, not options.require_manifest, apart, base)
