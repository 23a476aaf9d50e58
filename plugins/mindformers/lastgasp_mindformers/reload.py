"""Which checkpoint a job starts from: all ranks agree on the newest that verifies, before MindFormers reads the step.

MindFormers reads epoch and step long before it loads weights (mindformers.md §2), so the choice is made before
`Trainer.train` begins, and told by MindFormers' own resume options. Plain MindSpore has none: there the caller loads.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from lastgasp._fs import remove_stale_temps
from lastgasp.checkpoint import Agreement, Candidate, Verdict, agree, progress_bar, quarantine, verify
from lastgasp.checkpoint.trial import Trial
from lastgasp.errors import CheckpointError, ConfigError, DamagedCheckpoint, NoGoodCheckpoint
from lastgasp.mindspore.content import Unreadable, read_content
from lastgasp.mindspore.probe import probe
from lastgasp.ports import Gather, Layout
from lastgasp.topology import Place
from lastgasp_mindformers import begun
from lastgasp_mindformers.exits import is_about_content
from lastgasp_mindformers.layouts import ITERATIONS, LEGACY, LegacyName, decode_aux, layout_of, rank_of
from lastgasp_mindformers.listing import ENDINGS, CheckpointCatalog, catalog_of
from lastgasp_mindformers.manifests import AUX_SUFFIX
from lastgasp_mindformers.named import asked_by, holds_others, owner_of
from lastgasp_mindformers.steering import LoadPlan, ResumeRequest, apply, check, load_plan_for, resume_request_of
from lastgasp_mindformers.strategies import files_of, files_of_context, keep
from lastgasp_mindformers.tracker import repair_meta, repair_tracker
from lastgasp_mindformers.unfit import DoesNotLoad, Unfit

if TYPE_CHECKING:
    from lastgasp_mindformers.preload import FileOf, Preload
    from lastgasp_mindformers.settings import Options

log = logging.getLogger("lastgasp")

_LOST, _ENCODED = msgspec.json.Decoder(dict[str, str]), msgspec.json.encode


@dataclass(frozen=True)
class Selected:
    """What a rank of a plain training loads.

    Args:
        path: this rank's file.
        epoch: the current one, from 1; within: completed steps of it, both by its name.
        step: completed updates in all.
        small: this rank's auxiliary state; empty where there is none.
    """

    path: Path
    epoch: int
    within: int
    step: int
    aux: bytes


class MindFormersSelector:
    """Chooses what is loaded. All ranks make the same calls.

    Args:
        gather: the all-gather of the job.
        note: tells people what they must know about the checkpoint that was chosen (`Session.note`).

    Attributes:
        resumed: completed updates of the checkpoint that was chosen; None where none was.
        small: this rank's auxiliary state in it; empty where there is none.
    """

    def __init__(
        self,
        options: Options,
        place: Place,
        gather: Gather,
        note: Callable[[str], None] = lambda text: log.warning("%s", text),
    ) -> None:
        self._options, self._place, self._gather, self._note = options, place, gather, note
        self._load_plan: LoadPlan | None = None
        self._tried: tuple[Candidate, CheckpointCatalog] | None = None
        self._unfit = Unfit(options.gasp.directory, place, gather)
        self._preload: Preload | None = None
        self.resumed: int | None = None
        self.aux = b""

    # -- MindFormers ------------------------------------------------------------------------------

    def steer(self, config: Any, arguments: dict[str, Any]) -> None:
        """Choose, and set what MindFormers will load, before `Trainer.train` or `Trainer.finetune` begins.

        Args:
            config: the trainer's; arguments: those of the call, by name. Both are changed.

        Raises:
            NoGoodCheckpoint: there are checkpoints, or markers that name them, and none can be trusted.
            DamagedCheckpoint: the one that was asked for by name is damaged.
            ConfigError: the one that was asked for is not there.
            NothingLoads: the attempts before this one could load none.
        """
        request = resume_request_of(config, arguments)
        own, catalog = request.load is not None and holds_others(request.load), self._catalog(request)
        chosen = self._untried(catalog, asked_by(request), own)
        self._load_plan = self._load_plan_of(request, chosen)
        if chosen is not None:
            self._take(chosen)
            keep(files_of(config, self._place.rank), f"step-{chosen.step}")
            if request.load not in (None, chosen.path, chosen.path.parent) and self._place.rank == 0:
                log.warning("loading from %s, not from %s: this job has saved since", chosen.path.parent, request.load)
        self._gather("reload/ready", b"")  # rank 0 has repaired what all may be about to read
        if self._load_plan is not None:
            apply(self._load_plan, config, arguments)

    def check(self, config: Any) -> None:
        """What was chosen still is what MindFormers is about to load. Raises ConfigError."""
        if self._load_plan is not None:
            check(self._load_plan, config)

    def load(self, call: Callable[[], Any], check: Callable[[set[str]], None] = lambda held: None) -> Any:
        """Have MindFormers load what was chosen; all ranks call it together, and a second time it is a mere call.

        Args:
            call: of MindFormers.
            check: raises CheckpointError where the parameters of these names are not those of this training.

        Raises:
            DoesNotLoad: no rank can; the restart passes it over.
            CheckpointError: it loads here and not on another rank.
            Exception: what MindFormers raised, where it is not about the content, or not on all ranks.
        """
        if self._tried is None:
            return call()
        candidate, catalog = self._tried
        results: list[Any] = []
        trial = Trial(self._gather, is_about_content)

        def load(candidate: Candidate) -> None:
            if held := self._names_in(candidate):
                check(held)
            results.append(call())

        error = trial.attempt(candidate, load)
        if error is not None:
            [(_, reasons)] = trial.refused
            self._unfit.add(candidate.path, reasons)
            raise DoesNotLoad(str(candidate.path), reasons) from error
        self._tried = None
        if self._place.rank == 0:
            trial.refused = self._unfit.among(catalog.all()) if self._unfit.refused else []
            trial.set_aside(layout_of, self._note, candidate.step)
        self._unfit.forget()
        return results[0]

    def read(self, call: Callable[[], Any]) -> Any:
        """Have MindFormers read step and epoch of what was chosen, before it loads the rest. Raises as `load`."""
        try:
            return call()
        except Exception as error:
            return self.load(_raising(error))

    def _catalog(self, request: ResumeRequest) -> CheckpointCatalog:
        home = self._options.gasp.directory
        folders = [request.saves, home / "checkpoint", home]
        if request.load is not None and request.resume and not request.load.is_file():
            folders.append(request.load)
        layout: Layout = ITERATIONS if request.newer else LEGACY
        return self._catalog_of([(folder, layout) for folder in folders])

    def _catalog_of(self, places: Iterable[tuple[Path, Layout]]) -> CheckpointCatalog:
        return catalog_of(places, self._place, not self._options.require_manifest)

    def _load_plan_of(self, request: ResumeRequest, chosen: Candidate | None) -> LoadPlan | None:
        """None where MindFormers shall do what the user told it."""
        if chosen is None:
            foreign = request.load is not None and holds_others(request.load)
            return LoadPlan("", False) if request.resume and not foreign else None
        if request.newer:
            return LoadPlan(str(chosen.path), True, ours=not request.resume)
        name = LegacyName.parse(chosen.path.name)
        assert name is not None
        try:
            return load_plan_for(name, chosen.path.parent, self._place.rank, request.parallel, not request.resume)
        except OSError as error:
            raise CheckpointError(f"{chosen.path} cannot get another name for MindFormers: {error}") from error

    # -- plain MindSpore --------------------------------------------------------------------------

    def choose_plain(
        self,
        places: Iterable[tuple[Path, Layout]],
        into: Callable[[Path], None] = lambda path: None,
        preload: Callable[[FileOf, Place], Preload] | None = None,
    ) -> Selected | None:
        """What this rank of a plain training has loaded, by content and not by time stamps; None for a first start.

        One that verifies and that no rank can load is set aside, and the next one is tried.

        Args:
            places: directories and how checkpoints lie there, the same on all ranks: those of ModelCheckpoint, and
                that of LastGasp, where its own lie.
            into: loads a file of this rank; what it raises through is why it does not load.
            preload: makes what reads it ahead, while it is verified; None: it is verified first.

        Raises:
            NothingLoads: there are checkpoints that verify, and none of them loads.
            NoGoodCheckpoint, DamagedCheckpoint, ConfigError: as `steer`.
        """
        catalog, trial = self._catalog_of(places), Trial(self._gather, is_about_content)
        self._preload = None if preload is None else preload(self.file_for, self._place)
        chosen = trial.load(
            lambda refused: self._choose(catalog, None, refused=refused),
            lambda candidate: into(self._file_of(candidate)),
        )
        self._preload = None
        if chosen is not None:
            self._take(chosen)
            keep(files_of_context(), f"step-{chosen.step}")
            if self._place.rank == 0:
                trial.set_aside(layout_of, self._note, chosen.step)
        self._gather("reload/ready", b"")
        return None if chosen is None else self._choice(chosen)

    def choose_newer(self, directories: Iterable[Path]) -> Path | None:
        """The `iteration_*` directory that the pynative Trainer is to load; None for a first start.

        Args:
            directories: that hold such directories, or may.

        Raises:
            NoGoodCheckpoint, NothingLoads, DamagedCheckpoint, ConfigError: as `steer`.
        """
        chosen = self._untried(self._catalog_of([(directory, ITERATIONS) for directory in directories]), None)
        if chosen is not None:
            self._take(chosen)
        self._gather("reload/ready", b"")
        return None if chosen is None else chosen.path

    def _choice(self, chosen: Candidate) -> Selected:
        assert self.resumed is not None
        at = chosen.path.stem.removesuffix("_breakpoint").rpartition("-")[2].split("_")
        return Selected(self._file_of(chosen), int(at[0]), int(at[1]), self.resumed, self.aux)

    def _file_of(self, chosen: Candidate) -> Path:
        return self.file_for(chosen, self._place.rank)

    def file_for(self, chosen: Candidate, rank: int) -> Path:
        """A rank's file; that of another one where only that has saved what all of them held."""
        files = dict(layout_of(chosen.path).files(chosen.path))
        own = next((path for name, path in files.items() if rank_of(chosen.path, name) == rank), None)
        if own is not None or chosen.path.name in files:
            return own or files[chosen.path.name]
        if chosen.manifest is None or len(chosen.manifest.world.replica_groups) != 1:
            raise CheckpointError(f"{chosen.path} has no file for rank {rank}: {', '.join(sorted(files))}")
        return next(path for name, path in sorted(files.items()) if rank_of(chosen.path, name) is not None)

    def _names_in(self, candidate: Candidate) -> set[str]:
        """Of the parameters that this rank's files of a checkpoint hold; none where that cannot be told (encrypted)."""
        files = layout_of(candidate.path).files(candidate.path)
        own = [path for name, path in files.items() if rank_of(candidate.path, name) in (None, self._place.rank)]
        try:
            contents = [read_content(path, checksums=False) for path in own if path.suffix in ENDINGS]
        except (OSError, Unreadable):
            return set()
        return {name for content in contents for name in content.sizes}

    # -- choice -----------------------------------------------------------------------------------

    def _untried(self, catalog: CheckpointCatalog, asked: Path | None, given: bool = False) -> Candidate | None:
        """As `_choose`, for a framework that loads by itself: without what attempts before this one could not load."""
        chosen = self._choose(catalog, asked, given, refused=self._unfit.read())
        if chosen is None and self._unfit.refused:
            raise self._unfit.nothing_loads()
        self._tried = None if chosen is None else (chosen, catalog)
        return chosen

    def _choose(
        self, catalog: CheckpointCatalog, asked: Path | None, given: bool = False, refused: Collection[Path] = ()
    ) -> Candidate | None:
        """The checkpoint to load, verified; None where there is none, and none was lost.

        Args:
            given: the user has named weights to begin with, and files that nobody here knows may be these.
            refused: those that no rank could load.
        """
        if self._place.rank == 0:
            for folder in catalog.folders:
                remove_stale_temps(folder)
            catalog.put_back()
        self._gather("reload/tidied", b"")  # all ranks must list the same
        resume = self._options.gasp.resume
        if resume not in ("auto", "never"):
            asked = owner_of(Path(resume).absolute(), catalog)
        if asked is None:
            agreement = self._agree(catalog, own=resume == "never", refused=refused)
            if agreement.chosen is None and not refused:
                if resume == "auto":
                    self._refuse_if_lost(agreement, catalog, given)
                self._from_scratch(catalog)
            return agreement.chosen
        if self._place.attempt > 0:
            # A restart goes on from what the job has saved; where it started from counts only after that.
            agreement = self._agree(catalog, own=True, refused=refused)
            if agreement.chosen is not None:
                return agreement.chosen
        return self._explicit(asked, catalog) if asked not in refused else None

    def _explicit(self, path: Path, catalog: CheckpointCatalog) -> Candidate:
        there = dataclasses.replace(catalog, places=[(path.parent, layout_of(path))])
        agreement = self._agree(there, only=path)
        if agreement.chosen is None and not agreement.listed:
            remedy = "Look at `lastgasp verify` of its directory."
            raise ConfigError("resume or resume_training", str(path), "'auto', 'never' or a checkpoint", remedy)
        if agreement.chosen is None:
            raise DamagedCheckpoint(str(path), [why for reasons in agreement.rejected.values() for why in reasons])
        return agreement.chosen

    def _agree(
        self, catalog: CheckpointCatalog, own: bool = False, only: Path | None = None, refused: Collection[Path] = ()
    ) -> Agreement:
        found = [c for c in catalog.all() if c.path not in refused]
        if own:
            found = [c for c in found if c.manifest is not None and c.manifest.job == self._place.job]
        if only is not None:
            found = [c for c in found if c.path == only]
        found = self._first(found)
        agreement = agree(found, self._verify_share, self._gather, self._place.rank, self._place.world_size)
        self._report(agreement)
        return agreement

    def _first(self, found: list[Candidate]) -> list[Candidate]:
        """No more than `attempts` are read; further ones are listed."""
        untried, limit = [c for c in found if c.problem is None], self._options.attempts
        late = {c.path for c in untried[limit:]}
        why = f"was not tried: {limit} newer ones were. Set attempts to try more"
        return [dataclasses.replace(c, problem=why) if c.path in late else c for c in found]

    def _verify_share(self, candidate: Candidate) -> Verdict:
        """This rank's part: each byte is read by one rank, as all of them see the same disk.

        What a rank of a plain training is going to load it verifies itself, while it loads it.
        """
        share = (self._place.rank, self._place.world_size)
        layout = layout_of(candidate.path)
        if candidate.manifest is None:
            return probe(candidate.path, layout, candidate.step, share)
        with progress_bar(f"verifying {candidate.path.name}") as progress:
            check = functools.partial(
                verify, candidate.path, layout, manifest=candidate.manifest, share=share, progress=progress
            )
            return check() if self._preload is None else self._preload.verdict(candidate, check)

    def _report(self, agreement: Agreement) -> None:
        """Say what was not used and why; move away what is proven bad."""
        chosen = agreement.chosen
        if self._place.rank != 0:
            return
        for path, reasons in agreement.rejected.items():
            log.warning("%s was not used: %s", path, "; ".join(reasons))
        if chosen is None:
            return
        for bad in agreement.damaged:
            quarantine(bad, agreement.rejected[str(bad.path)], proven=True, layout=layout_of(bad.path))
        if chosen.manifest is None:
            log.warning(
                "%s has no manifest, so a flipped bit in it would not be seen; `lastgasp manifest %s` adds manifests, "
                "and require_manifest refuses checkpoints without one",
                chosen.path,
                chosen.path.parent,
            )

    def _refuse_if_lost(self, agreement: Agreement, catalog: CheckpointCatalog, given: bool) -> None:
        """Training from scratch over files of training that were there would lose them silently."""
        lost = {path: "; ".join(why) for path, why in agreement.rejected.items()}
        unfinished = all(catalog.never_finished(c) for c in catalog.all())
        if not agreement.listed:
            lost = catalog.lost() or ({} if given else catalog.unknown())
        if self._all(bool(lost) and unfinished and begun.exists(self._options.gasp.directory)):
            log.warning("this job began from scratch, and no save of it was finished: training begins from scratch")
        elif lost := self._of_all(lost):
            raise NoGoodCheckpoint(", ".join(map(str, catalog.folders)), lost)

    def _from_scratch(self, catalog: CheckpointCatalog) -> None:
        """Say it, and write it down."""
        if self._place.rank != 0:
            return
        over = [*(str(c.path) for c in catalog.all()), *catalog.unknown()]
        if over and self._options.gasp.resume == "never":
            log.warning("resume='never': training begins from scratch over %d files or checkpoints that stand in %s "
                        "(%s)", len(over), ", ".join(map(str, catalog.folders)), ", ".join(over[:3]))  # fmt: skip
        elif not over:
            log.info("no checkpoint in %s: training begins from scratch", ", ".join(map(str, catalog.folders)))
        begun.begin(self._options.gasp.directory, self._place.job)

    def _all(self, mine: bool) -> bool:
        return all(self._gather("reload/unfinished", b"1" if mine else b""))

    def _of_all(self, mine: dict[str, str]) -> dict[str, str]:
        """What any rank has found: no rank begins from scratch while another one refuses."""
        told = [_LOST.decode(payload) for payload in self._gather("reload/lost", _ENCODED(mine))]
        return {path: why for one in told for path, why in one.items()}

    # -- taking -----------------------------------------------------------------------------------

    def _take(self, chosen: Candidate) -> None:
        assert chosen.step is not None
        self.resumed = chosen.step
        self.aux = self._aux_of(chosen)
        begun.finished(self._options.gasp.directory)
        name, ranks = LegacyName.parse(chosen.path.name), range(self._place.world_size)
        if self._place.rank != 0:
            return
        log.info("going on behind step %d of %s", chosen.step, chosen.path)
        if name is not None:
            repair_meta(chosen.path.parent, name, ranks)
        elif layout_of(chosen.path) is ITERATIONS:
            repair_tracker(chosen.path.parent, chosen.step)

    def _aux_of(self, chosen: Candidate) -> bytes:
        """This rank's auxiliary state, where the manifest vouches for the file."""
        directory = chosen.path.is_dir()
        path = chosen.path / AUX_SUFFIX if directory else chosen.path.with_name(f"{chosen.path.name}.small")
        named = path.relative_to(chosen.path.parent).as_posix()
        if chosen.manifest is None or named not in {entry.path for entry in chosen.manifest.files}:
            return b""
        try:
            return decode_aux(path.read_bytes()).get(self._place.rank, b"")
        except (OSError, CheckpointError) as error:
            log.warning("the random state in %s could not be read, and is not restored: %s", path, error)
            return b""


def _raising(error: Exception) -> Callable[[], Any]:
    def call() -> Any:
        raise error

    return call
