"""What torchmetrics objects of the module have accumulated in an epoch is there again after a fault in its middle."""

from __future__ import annotations

import itertools
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import (
    CatMetric,
    MaxMetric,
    MeanMetric,
    MeanSquaredError,
    MetricCollection,
    MinMaxMetric,
    PearsonCorrCoef,
    R2Score,
)
from torchmetrics.aggregation import RunningMean
from torchmetrics.classification import (
    BinaryAccuracy,
    BinaryAUROC,
    BinaryConfusionMatrix,
    BinaryF1Score,
    BinaryPrecision,
    BinaryRecall,
)

from frameworks.fit_rig import AsOneOfSeveral, Job, Small, fit, gasp_of, seed
from lastgasp.adapter.torch import decode_aux
from lastgasp_lightning import metric_objects
from lastgasp_lightning.extra import Extra, behind_position, split_extra
from lastgasp_lightning.metric_objects import LIMIT, OF_ALL, OwnObjects
from lastgasp_lightning.metrics import is_behind
from lastgasp_lightning.metrics_again import accumulated, restore_objects
from support.launchers import incidents


class Measured(Small):
    """Metrics as users have them: logged as objects, in collections, computed by hand, wrapped; states of all types."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy, self.auroc, self.matrix = BinaryAccuracy(), BinaryAUROC(), BinaryConfusionMatrix()
        self.group = MetricCollection([BinaryF1Score(), BinaryRecall(), BinaryAccuracy()], prefix="group/")
        self.logged = MetricCollection({"mse": MeanSquaredError(), "r2": R2Score()})
        self.by_hand, self.persistent = PearsonCorrCoef(), MeanMetric()
        self.persistent.persistent(True)
        self.range, self.window, self.validated = MinMaxMetric(MeanMetric()), RunningMean(3), MeanMetric()
        self.never_reset = MeanMetric()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Everything at once."""
        self.trained.append(self.trainer.global_step)
        found = self.net(batch[0])
        loss: Tensor = ((found - batch[1]) ** 2).mean()
        value, target = found.detach().flatten(), batch[1].flatten()
        chance, label = value.sigmoid(), (target > 0).int()
        self.accuracy(chance, label)
        self.auroc.update(chance, label)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("auroc", self.auroc, on_step=False, on_epoch=True)
        self.log("loss", loss, on_epoch=True)
        self.group.update(chance, label)
        self.log_dict(self.logged(value, target), on_step=True)
        self.log_dict({f"object/{name}": one for name, one in self.logged.items()}, on_step=False, on_epoch=True)
        self.matrix.update(chance, label)
        self.by_hand.update(value, target)
        for metric in (self.persistent, self.range, self.window, self.never_reset):
            metric.update(loss.detach())
        self.log("range", self.range.compute()["max"] - self.range.compute()["min"])
        self.log("window", self.window.compute())
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """A metric of the validation's."""
        loss = ((self.net(batch[0]) - batch[1]) ** 2).mean()
        self.validated(loss)
        self.log("val_loss", self.validated)

    def on_train_epoch_end(self) -> None:
        """Computed by hand, and reset."""
        self.log_dict(self.group.compute())
        self.group.reset()
        self.log("pearson", self.by_hand.compute())
        self.by_hand.reset()
        self.log_dict({f"matrix/{i}": one for i, one in enumerate(self.matrix.compute().flatten().float())})
        self.matrix.reset()
        self.log("persistent", self.persistent.compute())
        self.persistent.reset()
        self.log("never_reset", self.never_reset.compute())


def rows(folder: Path) -> list[str]:
    (found,) = folder.glob("logs/**/metrics.csv")
    return found.read_text().splitlines()


def run(folder: Path, *strikes: int, model: Any = Measured, **options: Any) -> Job:
    """Two epochs of six batches, killed behind those steps."""
    job = Job(folder)
    for strike in (*strikes, None):
        seed(5)
        logger = CSVLogger(folder / "logs", flush_logs_every_n_steps=1)
        trainer = job.make(strike=strike, logger=logger, log_every_n_steps=1, num_sanity_val_steps=1, **options)
        data, validated = DataLoader(dataset(), 4, shuffle=True), DataLoader(dataset(), 8)
        assert fit(trainer, model(), data, val_dataloaders=validated) is (strike is None)
        job.restart()
    return job


def dataset() -> Any:
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(1, keepdim=True))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What is logged where nothing happens."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run(folder, val_check_interval=2)
    return rows(folder)


@pytest.mark.parametrize("strikes", [(1,), (4, 5), (6,), (9, 11)], ids=str)
def test_all_that_is_logged_is_the_same(strikes: tuple[int, ...], undisturbed: list[str], tmp_path: Path) -> None:
    job = run(tmp_path, *strikes, val_check_interval=2)
    assert rows(tmp_path) == undisturbed
    assert [one.notes for one in incidents(job.folder / "ckpts")] == [[]] * len(strikes)


class Large(Small):
    """Metrics that are not kept: too large, of too many parts, with a history that is no state, of other things."""

    def __init__(self) -> None:
        super().__init__()
        self.large = BinaryConfusionMatrix()
        self.large.add_state("more", torch.zeros(LIMIT, dtype=torch.uint8), dist_reduce_fx="sum")
        self.long, self.small, self.history = MeanOfAll(), MeanMetric(), WithHistory()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Each is updated."""
        loss = super().training_step(batch, batch_idx)
        self.large.update(torch.ones(2), torch.ones(2, dtype=torch.int))
        for _ in range(LIMIT // 64 // 5 + 1):
            self.long.update(1.0)
        self.small.update(loss.detach())
        self.history.update(loss.detach())
        self.log("long", self.long, on_step=False, on_epoch=True)
        return loss


class MeanOfAll(CatMetric):
    """Its state is a list."""

    def compute(self) -> Any:
        """Of all."""
        return torch.as_tensor(super().compute()).mean()


class WithHistory(MeanMetric):
    """Of a user's."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[float] = []

    def update(self, value: Tensor) -> None:  # type: ignore[override]
        """Kept in a list that is no state."""
        super().update(value)
        self.history.append(value.item())


def test_what_is_not_kept_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path, 6, model=Large)
    assert "without what they had in this epoch: history.history, large, long" in caplog.text


# -- several ranks ------------------------------------------------------------------------------------------


def alone(share: bytes) -> list[bytes]:
    """Gathers."""
    return [share]


def trainer_of(module: nn.Module) -> Any:
    loop = SimpleNamespace(_results=_ResultCollection(training=True), val_loop=SimpleNamespace(_results={}))
    fit_loop = SimpleNamespace(epoch_loop=loop)
    return SimpleNamespace(lightning_module=module, fit_loop=fit_loop, strategy=MagicMock(), world_size=1)


def rank_of(*values: float, pearson: bool = False) -> tuple[Any, bytes]:
    """One that has logged those."""
    module = nn.ModuleDict({"mean": MeanMetric(), "top": MaxMetric(), "all": CatMetric()})
    if pearson:
        module["pearson"] = PearsonCorrCoef()
    trainer = trainer_of(module)
    for value in values:
        for name, metric in module.items():
            metric(torch.tensor([value, 2.0]), torch.tensor([1.0, value])) if name == "pearson" else metric(value)
            trainer.fit_loop.epoch_loop._results.log("training_step", name, metric, metric_attribute=name)
    return trainer, OwnObjects(trainer).encode()


def values_of(trainer: Any) -> dict[str, Any]:
    return {name: one.compute().tolist() for name, one in trainer.lightning_module.items()}


def shares_of(*owns: bytes) -> list[bytes]:
    found: list[bytes] = []
    for own in owns:
        trainer, _ = rank_of()
        restore_objects(trainer, own, lambda share: [found.append(share) or share])  # type: ignore[func-returns-value]
    return found


def test_a_rank_that_has_lost_its_own_has_the_entries_of_the_others() -> None:
    own = rank_of(1.0, 5.0)[1]
    shares = shares_of(own, b"")
    for rank, data in enumerate((own, b"")):
        trainer, _ = rank_of()
        assert restore_objects(trainer, data, lambda _: shares) == ([1], [], False)
        assert [*trainer.fit_loop.epoch_loop._results] == [f"training_step.{n}" for n in ("mean", "top", "all")]
        if rank == 0:
            assert values_of(trainer) == {"mean": 3.0, "top": 5.0, "all": [1.0, 5.0]}


def test_where_all_have_lost_theirs_nothing_is_restored() -> None:
    trainer, _ = rank_of()
    assert restore_objects(trainer, b"", lambda one: [one, one]) == ([], [], False)
    assert not trainer.fit_loop.epoch_loop._results and not accumulated(b"")


def test_what_missing_ranks_have_accumulated_is_added_where_it_can_be() -> None:
    trainer, _ = rank_of(pearson=True)
    first, gone = rank_of(1.0, 2.0, pearson=True)[1], rank_of(9.0, pearson=True)[1]
    assert accumulated(gone) and not accumulated(rank_of()[1])
    lost, lacks, _ = restore_objects(trainer, first, alone, [gone, b""])
    assert (lost, lacks) == ([], ["pearson"])
    found = values_of(trainer)
    assert (found["mean"], found["top"], found["all"]) == (4.0, 9.0, [1.0, 2.0, 9.0])
    assert trainer.lightning_module["mean"].update_count == 3


def test_what_is_added_behind_the_update_is_told_as_lacking() -> None:
    """From the second time on: it is known then."""
    trainer, _ = rank_of()
    mean, own, found = trainer.lightning_module["mean"], OwnObjects(trainer), []
    for value in (1.0, 2.0, 3.0):
        found.append(own.at(settled=False))
        assert own.at(settled=False) is found[-1], "so that nothing is written twice"
        mean.update(value)
        own.at(settled=True)
    assert [restore_objects(rank_of()[0], one, alone)[2] for one in found] == [False, True, True]
    restore_objects(trainer, found[-1], alone)
    assert mean.compute() == 1.5


class Hooked(Small):
    """Logs in the step's last hook; notes what others would find, were this rank killed in it."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.found = MeanMetric(), list[tuple[bool, bool]]()

    def on_train_batch_end(self, *args: Any) -> None:
        """Behind the update."""
        extra = split_extra(decode_aux(gasp_of(self.trainer)._run.state.aux(self.global_step)).extra)
        self.found.append((is_behind(extra.accumulators), restore_objects(rank_of()[0], extra.objects, alone)[2]))
        self.mean.update(1.0)
        self.log("late", 1.0, on_epoch=True)


def test_what_a_killed_rank_has_not_logged_in_its_last_hook_is_told_as_lacking(tmp_path: Path) -> None:
    assert fit(Job(tmp_path).make(AsOneOfSeveral(), max_epochs=1), model := Hooked())
    assert model.found == [(False, False)] + [(True, True)] * 5


def test_rank_0_goes_on_with_what_the_first_rank_has_logged_in_the_step() -> None:
    trainer, _ = rank_of()
    restore_objects(trainer, rank_of(1.0, 2.0)[1], alone, [], rank_of(7.0)[1])
    assert trainer.fit_loop.epoch_loop._results["training_step.mean"]._forward_cache == 7.0


def test_nothing_is_encoded_twice_and_every_change_is_seen() -> None:
    module: Any = nn.ModuleDict({"mean": MeanMetric(), "all": CatMetric()})
    own = OwnObjects(trainer_of(module))
    seen = [own.encode()]
    assert own.encode() is seen[0]
    module["mean"].update(1.0)
    seen.append(own.encode())
    module["all"].update(1.0)
    seen.append(own.encode())
    with torch.inference_mode():
        module["mean"].update(4.0)
    seen.append(own.encode())
    module["mean"].mean_value += 1.0
    seen.append(own.encode())
    module["all"].reset()
    seen.append(own.encode())
    module["mean"] = MeanMetric()
    seen.append(own.encode())
    assert all(one != other for one, other in itertools.pairwise(seen))
    assert own.encode() is seen[-1] == seen[0]


class Odd(MeanMetric):
    """What it holds besides cannot be shown."""

    def __init__(self) -> None:
        super().__init__()
        self.besides = [Unshown()]


class Unshown:
    """Of a user's."""

    def __repr__(self) -> str:
        raise RuntimeError("not here")


def test_a_metric_that_is_like_no_other_costs_the_job_nothing() -> None:
    module: Any = nn.ModuleDict({"odd": Odd(), "mean": MeanMetric()})
    own = OwnObjects(trainer_of(module))
    assert own.encode()
    del vars(module["odd"])["_update_count"]
    assert own.encode() == b"" and "odd" in own.unsaved()
    assert own.known() == {"objects": True, "unsaved": own.unsaved()}


def marked(*metrics: Any) -> tuple[Any, bytes]:
    """A collection of those, which have seen something."""
    trainer = trainer_of(nn.ModuleDict({"all": MetricCollection([*metrics])}))
    own = OwnObjects(trainer)
    trainer.lightning_module["all"].update(torch.tensor([0.1, 0.7]), torch.tensor([0, 1]))
    return trainer, own.encode()


def test_a_collection_with_other_metrics_than_before_costs_the_job_nothing() -> None:
    own = marked(BinaryAccuracy(), BinaryF1Score(), BinaryRecall())[1]
    module: Any = nn.ModuleDict({"all": MetricCollection([BinaryRecall(), BinaryPrecision()])})
    assert restore_objects(trainer_of(module), own, alone) == ([], [], False)
    assert module["all"]["BinaryRecall"].compute() == 1.0 and module["all"]["BinaryPrecision"].update_count == 0
    module["all"].update(torch.tensor([0.1, 0.2]), torch.tensor([0, 1]))
    assert module["all"].compute() == {"BinaryRecall": 0.5, "BinaryPrecision": 0.0}


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (lambda: BinaryAccuracy(threshold=0.5), lambda: BinaryAccuracy(threshold=0.8)),
        (lambda: BinaryAUROC(thresholds=[0.0, 0.5, 1.0]), lambda: BinaryAUROC(thresholds=[0.0, 0.6, 1.0])),
        (lambda: BinaryAUROC(thresholds=3), lambda: BinaryAUROC(thresholds=5)),
        (BinaryAccuracy, lambda: BinaryAccuracy(multidim_average="samplewise")),
    ],
)
def test_a_metric_that_is_made_otherwise_now_begins_anew_and_is_named(before: Any, now: Any) -> None:
    (_, own), (name,) = marked(metric := before()), [type(metric).__name__]
    trainer = trainer_of(nn.ModuleDict({"all": MetricCollection([now()])}))
    found, fresh = trainer.lightning_module["all"][name], now()
    assert restore_objects(trainer, own, alone) == ([], [f"all.{name}"], False)
    assert found.update_count == 0 and vars(found).get("threshold") == vars(fresh).get("threshold")
    for one in (found, fresh):
        one.update(torch.tensor([[0.1], [0.7]]), torch.tensor([[0], [1]]))
    assert torch.equal(found.compute(), fresh.compute())


def test_what_does_not_fit_is_not_copied_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[Any] = []
    monkeypatch.setattr(metric_objects, "_numbers", lambda value: copied.extend([value] * isinstance(value, Tensor)))
    module: Any = nn.ModuleDict({"large": BinaryConfusionMatrix(), "all": CatMetric()})
    module["large"].confmat = torch.zeros(LIMIT // 8 + 1, dtype=torch.long)
    module["all"].update(torch.zeros(LIMIT))
    own = OwnObjects(trainer_of(module))
    module["large"]._update_count = 1
    assert own.encode() and own.unsaved() == ["all", "large"] and not copied


def test_of_many_ranks_each_keeps_less() -> None:
    module: Any = nn.ModuleDict({"all": CatMetric()})
    trainer = trainer_of(module)
    trainer.world_size = 4 * OF_ALL // LIMIT
    own = OwnObjects(trainer)
    module["all"].update(torch.zeros(LIMIT // 20))
    assert own.encode() and not own.unsaved()
    module["all"].update(torch.zeros(LIMIT // 20))
    assert own.encode() and own.unsaved() == ["all"]


class Keeps(MeanMetric):
    """Things besides its states, of types that no metric of torchmetrics has."""

    def __init__(self, **things: Any) -> None:
        super().__init__()
        vars(self).update(things)


@pytest.mark.parametrize(
    ("thing", "change"),
    [
        (np.zeros(3), lambda one: one.thing.__setitem__(0, 1.0)),
        (deque(), lambda one: one.thing.append(1)),
        ({"a": [torch.zeros(1)]}, lambda one: one.thing["a"][0].add_(1)),
        (None, lambda one: setattr(one, "thing", torch.zeros(3))),
        (1, lambda one: setattr(one, "thing", [1])),
    ],
    ids=["array", "deque", "tensor in lists", "none", "plain"],
)
def test_what_a_metric_keeps_besides_is_named_once_it_has_changed(thing: Any, change: Any) -> None:
    module: Any = nn.ModuleDict({"mine": Keeps(thing=thing)})
    own = OwnObjects(trainer_of(module))
    assert not own.unsaved()
    change(module["mine"])
    assert own.unsaved() == ["mine.thing"]


def test_the_parts_of_the_extra_are_told_apart() -> None:
    for parts in ((b"a", b"", b""), (b"", b"b", b""), (b"a", b"b", b""), (b"", b"", b"cc"), (b"a", b"bb", b"ccc")):
        assert split_extra(b"at" + behind_position(*parts)) == Extra(b"at", *parts)
    assert split_extra(b"at") == Extra(b"at")
