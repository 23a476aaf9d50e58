"""Which checkpoint a job starts from: all ranks agree on the newest that verifies, before MindFormers reads the step.

MindFormers reads epoch and step long before it loads weights (mindformers.md §2), so the choice is made before
`Trainer.train` begins, and passed on by its resume options. Plain MindSpore has none: there the caller loads.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lastgasp.adapter import (
    CheckpointError,
    CheckpointSelector,
    Gather,
    Layout,
    NoGoodCheckpoint,
    Options,
    Place,
    Preload,
)
from lastgasp.adapter.checkpoint import Candidate, Trial
from lastgasp.adapter.mindspore import ITERATIONS, LEGACY, LegacyName, Unreadable, layout_of, rank_of, read_content
from lastgasp_mindformers import begun
from lastgasp_mindformers.base import Base, begun_from
from lastgasp_mindformers.exits import is_about_content
from lastgasp_mindformers.later import recorded
from lastgasp_mindformers.listing import ENDINGS, CheckpointCatalog, by_samples
from lastgasp_mindformers.named import asked_by, holds_others
from lastgasp_mindformers.policy import MindFormersPolicy, catalog_for
from lastgasp_mindformers.steering import (
    LoadPlan,
    ResumeRequest,
    apply,
    check,
    chooses_itself,
    converts,
    data_of_the_start,
    load_plan_for,
    resume_request_of,
)
from lastgasp_mindformers.strategies import files_of, files_of_context, keep
from lastgasp_mindformers.unfit import DoesNotLoad, Unfit

if TYPE_CHECKING:
    from lastgasp_mindformers.preload import FileOf

log = logging.getLogger("lastgasp")

_OTHER_SIZE = re.compile(r"(?:.*: )?was saved by (\d+) ranks, and this job has \d+")


@dataclass(frozen=True)
class Selected:
    """What a rank of a plain training loads.

    Args:
        path: this rank's file.
        epoch: the current one, from 1; within: completed steps of it, both by its name.
        step: completed updates in all.
        aux: this rank's auxiliary state; empty where there is none.
    """

    path: Path
    epoch: int
    within: int
    step: int
    aux: bytes


class MindFormersSelector:
    """Selects what is loaded. All ranks make the same calls.

    Args:
        gather: the all-gather of the job.
        note: reports what people must know about the selected checkpoint (`Session.note`).

    Attributes:
        resumed: completed updates of the checkpoint that was chosen; None where none was.
        aux: this rank's auxiliary state in it; empty where there is none.
        steered: whether MindFormers' own Trainer was told what to load; else nobody has loaded for lastgasp.
        apart: files that are no checkpoints of this training, as `CheckpointCatalog.apart`.
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
        self._catalog: CheckpointCatalog
        self._tried: Candidate | None = None
        self._unfit = Unfit(options.gasp.directory, place, gather)
        self.resumed: int | None = None
        self.aux = b""
        self.steered = False
        self.present: frozenset[str] | None = None
        self.apart: set[tuple[str, str]] = set()
        self._base: Base | None = None

    # -- MindFormers ------------------------------------------------------------------------------

    def steer(self, config: Any, arguments: dict[str, Any]) -> None:
        """Choose, and set what MindFormers will load, before `Trainer.train` or `Trainer.finetune` begins.

        Args:
            config: the trainer's; arguments: those of the call, by name. Both are changed.

        Raises:
            NoGoodCheckpoint: there are checkpoints, or markers that name them, and none can be trusted.
            DamagedCheckpoint: the one that was asked for by name is damaged.
            ConfigError: the one that was asked for is not there, or MindFormers would load another one.
            NothingLoads: the attempts before this one could load none.
        """
        self.steered = True
        request = resume_request_of(config, arguments)
        by_health = chooses_itself(config, request.newer)
        given = request.load is not None and holds_others(request.load)
        places = self._places(request)
        self._base = self._begun_from(request, places)
        try:
            chosen = self._select(self._policy(places, named=asked_by(request), given=given))
        except NoGoodCheckpoint as error:
            if not (request.load and request.resume is True and converts(config, arguments)):
                raise
            if not (ranks := self._ranks_of_others(error.reasons)):
                raise
            self._note(f"what MindFormers resumes from is not verified by lastgasp: it is converted from {ranks} ranks")
            if self._place.rank == 0:
                begun.begin(self._options.gasp.directory, self._place.job)
            return
        self._load_plan = self._load_plan_of(request, chosen)
        if chosen is not None:
            keep(files_of(config, self._place.rank), f"step-{chosen.step}")
            if by_health:
                self._note("use_checkpoint_health_monitor: lastgasp resumes from the newest checkpoint that verifies, "
                           "whatever MindFormers' health check has said of it")  # fmt: skip
            if request.load not in (None, chosen.path, chosen.path.parent) and self._place.rank == 0:
                since = self._who_saved(chosen)
                log.warning("loading from %s, not from %s: %s", chosen.path.parent, request.load, since)
        elif others := self._catalog.others():
            self._tell_of_others(request, others)
        if self._load_plan is not None:
            self._tell_of_data(self._load_plan, data_of_the_start(config, arguments))
            apply(self._load_plan, config, arguments)

    def _begun_from(self, request: ResumeRequest, places: list[tuple[Path, Layout]]) -> Base | None:
        """Where the user names weights to begin with, only what is saved from then on is progress."""
        if request.load is None or request.resume:
            return None
        there = catalog_for(places, self._options, self._place).there
        return begun_from(request.load, self._options.gasp.directory, self._place, self._gather, there)

    def _tell_of_others(self, request: ResumeRequest, others: list[Candidate]) -> None:
        where = ", ".join(sorted({str(other.path.parent) for other in others}))
        self._note(
            f"training begins from load_checkpoint ({request.load}): in {where} there is progress of other trainings "
            f"({len(others)} checkpoints) and none of this one. To go on from one of them give resume=<path>, or "
            "resume_training: True for the newest"
        )

    def _who_saved(self, chosen: Candidate) -> str:
        if chosen.manifest is not None and chosen.manifest.job == self._place.job:
            return "this job has saved since"
        return "it is the newest" if self._base is None else "an earlier start of this training has saved since"

    def in_order(self, found: list[Candidate]) -> list[Candidate]:
        """Of a directory where this training saves, what it has saved itself, newest first."""
        return by_samples(one for one in found if self._base is None or not self._base.is_other(one))

    def _ranks_of_others(self, reasons: Mapping[str, str]) -> str:
        """How many ranks have saved what cannot be used; empty where there is more than a first save cut short."""
        cut: set[str] = set()
        if begun.exists(self._options.gasp.directory):
            cut = {str(candidate.path) for candidate in self._catalog.all() if self._catalog.never_finished(candidate)}
        found = [_OTHER_SIZE.fullmatch(why) for path, why in reasons.items() if path not in cut]
        if not all(self._gather("select/converted", b"1" if found and all(found) else b"")):
            return ""
        return " or ".join(sorted({match[1] for match in found if match}))

    def _tell_of_data(self, plan: LoadPlan, options: str) -> None:
        """Where a training that resumes itself has begun in the data is not known to its restart."""
        if not plan.load or not options:
            return
        if plan.ours and self._place.rank == 0:
            log.info("%s: for the start only; the data go on behind step %d", options, plan.step)
        if not plan.ours and self._place.restarted:
            self._note(f"{options} of the start: the data of this restart begin there once more, not behind those that "
                       "were trained on")  # fmt: skip

    def check(self, config: Any) -> None:
        """Check that MindFormers is still about to load the selected checkpoint. Raises ConfigError."""
        if self._load_plan is not None:
            check(self._load_plan, config)

    def load(self, call: Callable[[], Any], check: Callable[[set[str]], None] = lambda held: None) -> Any:
        """Have MindFormers load what was chosen; all ranks call it together; a second call only calls through.

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
        candidate, catalog = self._tried, self._catalog
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

    def _places(self, request: ResumeRequest) -> list[tuple[Path, Layout]]:
        home = self._options.gasp.directory
        folders = [request.saves, home / "checkpoint", home]
        if request.load is not None and request.resume and not request.load.is_file():
            folders.append(request.load)
        layout: Layout = ITERATIONS if request.newer else LEGACY
        return [(folder, layout) for folder in folders]

    def _load_plan_of(self, request: ResumeRequest, chosen: Candidate | None) -> LoadPlan | None:
        """None if MindFormers is to do what the user configured."""
        if chosen is None:
            foreign = request.load is not None and holds_others(request.load)
            return LoadPlan("", False) if request.resume and not foreign else None
        if request.newer:
            return LoadPlan(str(chosen.path), True, ours=not request.resume, step=chosen.step or 0)
        name = LegacyName.parse(chosen.path.name)
        assert name is not None
        try:
            plan = load_plan_for(name, chosen.path.parent, self._place.rank, request.parallel, not request.resume)
            own = chosen.manifest is not None and self._is_own(request, chosen.path.parent, chosen.manifest.job)
            return dataclasses.replace(plan, step=chosen.step or 0, own=own)
        except OSError as error:
            raise CheckpointError(f"{chosen.path} cannot get another name for MindFormers: {error}") from error

    def _is_own(self, request: ResumeRequest, folder: Path, job: str) -> bool:
        """Whether the options were given for other weights: an earlier attempt has saved these, or they lie elsewhere.

        They are of this number of ranks, whoever has saved them.
        """
        if self._base is not None or (self._place.restarted and job == self._place.job):
            return True
        return request.load is not None and not request.load.resolve().is_relative_to(folder.resolve())

    # -- plain MindSpore --------------------------------------------------------------------------

    def choose_plain(
        self,
        places: Iterable[tuple[Path, Layout]],
        into: Callable[[Path, Any], None] = lambda path, values: None,
        preload: Callable[[FileOf, Place], Preload] | None = None,
    ) -> Selected | None:
        """What this rank of a plain training has loaded, by content rather than time stamps; None for a first start.

        One that verifies and that no rank can load is set aside, and the next one is tried.

        Args:
            places: directories and how checkpoints lie there, the same on all ranks: those of ModelCheckpoint, and
                that of LastGasp, where its own lie.
            into: loads a file of this rank, or the values in it; what it raises is why it does not load.
            preload: makes a parser that runs during verification; None: it is verified first, without parsing.

        Raises:
            NothingLoads: there are checkpoints that verify, and none of them loads.
            NoGoodCheckpoint, DamagedCheckpoint, ConfigError: as `steer`.
        """
        policy = self._policy(places, preload=None if preload is None else preload(self.file_for, self._place))

        def load(candidate: Candidate) -> None:
            path = self._file_of(candidate)
            into(path, policy.preload.take(path) if policy.preload is not None else None)

        selector = CheckpointSelector(policy, self._gather, is_about_content)
        chosen = selector.load(load)
        self._took(policy, selector)
        if chosen is None:
            return None
        keep(files_of_context(), f"step-{chosen.step}")
        return self._choice(chosen)

    def choose_newer(self, directories: Iterable[Path]) -> Path | None:
        """The `iteration_*` directory that the pynative Trainer is to load; None for a first start.

        Args:
            directories: that hold such directories, or may.

        Raises:
            NoGoodCheckpoint, NothingLoads, DamagedCheckpoint, ConfigError: as `steer`.
        """
        chosen = self._select(self._policy([(directory, ITERATIONS) for directory in directories]))
        return None if chosen is None else chosen.path

    def _choice(self, chosen: Candidate) -> Selected:
        assert self.resumed is not None
        at = chosen.path.stem.removesuffix("_breakpoint").rpartition("-")[2].split("_")
        return Selected(self._file_of(chosen), int(at[0]), int(at[1]), self.resumed, self.aux)

    def _file_of(self, chosen: Candidate) -> Path:
        return self.file_for(chosen, self._place.rank)

    def file_for(self, chosen: Candidate, rank: int) -> Path:
        """A rank's file; another rank's if only that one saved what all of them hold."""
        files = dict(layout_of(chosen.path).files(chosen.path))
        own = next((path for name, path in files.items() if rank_of(chosen.path, name) == rank), None)
        if own is not None or chosen.path.name in files:
            return own or files[chosen.path.name]
        if chosen.manifest is None or len(chosen.manifest.world.replica_groups) != 1:
            raise CheckpointError(f"{chosen.path} has no file for rank {rank}: {', '.join(sorted(files))}")
        return next(path for name, path in sorted(files.items()) if rank_of(chosen.path, name) is not None)

    def _names_in(self, candidate: Candidate) -> set[str]:
        """Of the parameters that this rank's files of a checkpoint hold; empty if that is unknown (encrypted)."""
        files = layout_of(candidate.path).files(candidate.path)
        own = [path for name, path in files.items() if rank_of(candidate.path, name) in (None, self._place.rank)]
        try:
            contents = [read_content(path, checksums=False) for path in own if path.suffix in ENDINGS]
        except (OSError, Unreadable):
            return set()
        return {name for content in contents for name in content.sizes}

    def _policy(self, places: Iterable[tuple[Path, Layout]], **more: Any) -> MindFormersPolicy:
        others = recorded(self._options.gasp.directory)
        if others and self._place.rank == 0:
            named = ", ".join(sorted(f"{folder}/{prefix}" for folder, prefix in others))
            log.info("files without a manifest that later trainings of this script saved are left alone: %s", named)
        self._catalog = catalog_for(list(places), self._options, self._place, self.apart | others, self._base)
        return MindFormersPolicy(self._options, self._place, self._catalog, self._note, **more)

    def _select(self, policy: MindFormersPolicy) -> Candidate | None:
        """For a framework that does its own loading: without what earlier attempts could not load."""
        selector = CheckpointSelector(policy, self._gather, is_about_content)
        chosen = selector.select(self._unfit.read())
        if chosen is None and self._unfit.refused:
            raise self._unfit.nothing_loads()
        self._tried = chosen
        self._took(policy, selector)
        return chosen

    def _took(self, policy: MindFormersPolicy, selector: CheckpointSelector) -> None:
        others = {c.manifest.self_digest for c in self._catalog.others() if c.manifest is not None}
        self.resumed, self.aux, self.present = policy.resumed, policy.aux, selector.present | others


def _raising(error: Exception) -> Callable[[], Any]:
    def call() -> Any:
        raise error

    return call
