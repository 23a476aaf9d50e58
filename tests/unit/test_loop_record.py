"""What a session's checkpoint keeps of each rank, and what is done without it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from lastgasp.checkpoint import Staged
from lastgasp.checkpoint.writer import ManifestWriter
from lastgasp.errors import CheckpointError, NotSaveable
from lastgasp.pytorch import Session, TorchState
from lastgasp.pytorch.aux_state import NOTHING, AuxRecorder, Since, decode_aux
from lastgasp.pytorch.loop.copies import Copies
from lastgasp.pytorch.loop.files import LAYOUT, gasp_path
from lastgasp.pytorch.loop.position_record import Fixed, Position, Row, decode, encode, position_only
from lastgasp.pytorch.loop.record import KEY, aux_of, buffers_of, notes_on, record_of
from lastgasp.pytorch.staged import contribute, with_added
from lastgasp.topology import Place


@pytest.fixture
def recorders() -> Iterator[list[AuxRecorder]]:
    """Two ranks, whose buffers differ."""
    found = []
    for rank in range(2):
        module = nn.BatchNorm1d(2)
        assert module.running_mean is not None
        module.running_mean.fill_(float(rank))
        found.append(AuxRecorder((), module))
        found[-1].capture(7, settled=True)
    yield found
    for recorder in found:
        recorder.close()


def aux(recorder: AuxRecorder) -> bytes:
    """Of step 7."""
    data = recorder.read(7)
    assert data is not None
    return data


def test_buffers_are_those_of_rank_0_where_they_are_at_hand(recorders: list[AuxRecorder]) -> None:
    aux_states = {rank: aux(recorder) for rank, recorder in enumerate(recorders)}
    assert buffers_of(7, aux_states, recorders[1], [0, 1])["running_mean"].tolist() == [0.0, 0.0]
    del aux_states[0]  # rank 0 died on a host that nobody can reach
    assert buffers_of(7, aux_states, recorders[1], [0, 1])["running_mean"].tolist() == [1.0, 1.0]
    assert buffers_of(7, {}, recorders[1], [0, 1]) == {}


def test_whether_random_numbers_were_drawn(recorders: list[AuxRecorder]) -> None:
    one = recorders[0]
    one.capture(8, settled=False)
    one.capture(8, settled=True)
    assert one.since() == NOTHING
    torch.rand(1)
    one.capture(9, settled=False)
    assert one.since() == Since(drew=True, changed=False)


@pytest.mark.parametrize("large", [False, True])
def test_whether_buffers_were_changed(large: bool) -> None:
    """As by an average of the weights that follows the update and counts its calls."""
    module = torch.nn.BatchNorm1d(3)
    module.register_buffer("mask", torch.zeros(1 << 15))
    with contextlib.closing(AuxRecorder((), module)) as one:
        for settled in (False, True, False):
            one.capture(8, settled)
        assert one.since() == NOTHING
        module.get_buffer("mask" if large else "num_batches_tracked").add_(1)
        one.capture(8, settled=True)
        assert one.since() == Since(drew=False, changed=True)


@pytest.mark.parametrize("how", ["replaced", "data", "pointer", "in-place"])
@pytest.mark.parametrize("size", [8, 1 << 15])
def test_buffers_are_those_of_each_step_however_they_are_changed(how: str, size: int) -> None:
    """DINO makes its centre anew in each step, VQ-VAE changes codebooks by `.data`: neither counts in `_version`."""
    module: Any = nn.Module()
    module.register_buffer("centre", torch.zeros(size))
    recorder = AuxRecorder((), module)
    try:
        for step in range(1, 9):
            if how == "replaced":
                module.centre = module.centre + 1
            elif how == "pointer":
                module.centre.data = module.centre + 1
            else:
                (module.centre.data if how == "data" else module.centre).add_(1)
            recorder.capture(step, settled=True)
            assert decode_aux(recorder.read(step) or b"").buffers["centre"].tolist() == [step] * size
    finally:
        recorder.close()


def test_a_sparse_buffer_is_kept_in_this_process() -> None:
    """As graphs have them; no other process needs it, since DDP refuses such models."""
    module: Any = nn.Module()
    module.register_buffer("graph", torch.eye(3).to_sparse())
    recorder = AuxRecorder((), module)
    try:
        for step in (1, 2, 3):
            one_more = torch.zeros(3, 3)
            one_more[0, step % 3] = 1.0
            module.graph = (module.graph * 2 + one_more.to_sparse()).coalesce()
            recorder.capture(step, settled=True)
        kept = recorder.buffers.on_device(3)["graph"].to_dense()
        assert torch.equal(kept, module.graph.to_dense()) and "graph" not in decode_aux(recorder.read(3) or b"").buffers
    finally:
        recorder.close()


def with_a_graph(value: float) -> nn.Module:
    """A buffer that no other process can read, as those on an accelerator, and one that others can."""
    module = nn.Linear(2, 2)
    module.register_buffer("mean", torch.tensor([value, 0.0]).to_sparse())
    module.register_buffer("host", torch.tensor([value]))
    return module


def test_it_is_noted_whose_buffers_no_other_process_can_read() -> None:
    zero, one = AuxRecorder((), with_a_graph(0.5)), AuxRecorder((), with_a_graph(-7.0), host_buffers=False)
    with contextlib.closing(zero), contextlib.closing(one):
        for recorder in (zero, one):
            recorder.capture(7, settled=True)
        aux_states = {0: aux(zero), 1: aux(one)}
        found = buffers_of(7, aux_states, one, [0, 1])
        assert found["host"].tolist() == [0.5] and found["mean"].to_dense().tolist() == [-7.0, 0.0]
        note = one.note_on_buffers(aux_states, 1, [0])
        assert "(mean)" in note and "rank 1," in note and "ranks [0]" in note
        assert not zero.note_on_buffers(aux_states, 0, [0]) and zero.note_on_buffers(aux_states, 0, [0, 1])
        assert not one.note_on_buffers({1: aux_states[1]}, 1, [0])  # all of rank 0's is lost, which has its own note
        assert not decode_aux(aux_states[1]).buffers


def test_a_survivor_notes_that_rank_0s_buffers_died_with_its_device(tmp_path: Path) -> None:
    model = with_a_graph(-7.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Session.open(tmp_path, state=TorchState(model, optimizer)) as s:
        for _ in s.batches([1]):
            model(torch.ones(2)).sum().backward()
            optimizer.step()
        run = s._run
        assert not run.dump(1, {})[KEY]["notes"]
        place, own = run.place, run.recorder.read(1) or b""
        run.place, run.rank = replace(place, rank=1, world_size=2), 1
        [note] = run.dump(1, {0: own})[KEY]["notes"]
        run.place, run.rank = place, 0
    assert "those of rank 1" in note


def with_weights() -> Any:
    """Quantized ones, in a buffer that is kept where it lies."""
    module: Any = nn.Module()
    module.register_buffer("qweight", torch.ones(1 << 16).to_sparse())
    return module


def test_a_large_buffer_on_a_device_is_copied_once_while_it_is_the_same() -> None:
    module = with_weights()
    with contextlib.closing(AuxRecorder((), module)) as recorder:
        for step in range(1, 6):
            recorder.capture(step, settled=False)
            recorder.capture(step, settled=True)
        slots = recorder.buffers._slots
        assert len(slots) > 2 and len({id(slot.targets[0]) for slot in slots}) == 1
        assert slots[0].targets[0] is not None and slots[0].targets[0] is not module.qweight
        module.qweight._values().mul_(2)  # counted by the values alone, as nobody could know
        module.qweight = module.qweight.clone()
        recorder.capture(6, settled=True)
        assert recorder.buffers.on_device(6)["qweight"].to_dense().sum() == 2 << 16
        assert recorder.buffers.on_device(5)["qweight"].to_dense().sum() == 1 << 16


def test_a_buffer_without_room_for_a_copy_costs_protection_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(tensor: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    module = with_weights()
    same = module.qweight.clone()
    monkeypatch.setattr(Tensor, "clone", refused)
    with contextlib.closing(AuxRecorder((), module)) as recorder:
        for step in (1, 2):
            recorder.capture(step, settled=True)
        assert recorder.buffers.on_device(2)["qweight"].to_dense().sum() == 1 << 16
        module.qweight = same
        with pytest.raises(NotSaveable, match="qweight has changed"):
            recorder.buffers.on_device(2)
        recorder.capture(3, settled=True)
        assert "qweight" in recorder.buffers.on_device(3)
    assert caplog.text.count("no copy of the buffer qweight can be kept") == 1


def test_a_position_without_random_state() -> None:
    rows = [Row(kind="stateful", consumed=3, outer=True, state=b"s"), Row(kind="map", consumed=2)]
    whole = encode(Position(epoch=4, done=1, explicit=True, rows=rows), b"\x92\x80\x80")
    position, fixed = decode(position_only(whole))
    assert (position.epoch, position.done, position.explicit) == (4, 1, True)
    assert [(row.consumed, row.outer, row.state) for row in position.rows] == [(3, True, b""), (2, False, b"")]
    assert fixed == [Fixed(), Fixed()]


def test_positions_written_before_digests_and_ends_are_read() -> None:
    """As 0.1.0's predecessors encoded them: no digest, no counters, no ends."""
    row = {"kind": "stream", "consumed": 3, "outer": False, "over": False, "state": b""}
    head = {"version": 1, "epoch": 2, "done": 1, "explicit": True, "rows": [row], "stale": False, "extra": b""}
    names = ("at_iter", "at_first", "sampler", "fetch")
    fixed = [{"start": {}, "generators": [b"g"], **{name: name.encode() for name in names}}]
    data = msgspec.msgpack.encode(head)
    position, [found] = decode(len(data).to_bytes(4, "little") + data + msgspec.msgpack.encode(fixed))
    assert (position.epoch, position.done, position.ends) == (2, 1, {})
    assert (found.at_iter, found.at_first, found.generators, found.digest) == (b"at_iter", b"at_first", [b"g"], b"")


@pytest.mark.parametrize("data", [b"", b"\x05\x00\x00\x00ab", encode(Position(version=9), b"\x90")])
def test_a_position_that_cannot_be_read(data: bytes) -> None:
    with pytest.raises(CheckpointError, match="position"):
        decode(data)


def test_copies_are_those_of_the_moment_they_were_taken() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    copies = Copies([model], [optimizer])
    for number in range(3):
        before = [p.detach().clone() for p in model.parameters()]
        state = optimizer.state_dict()["state"]
        steps = [float(s["step"]) for s in state.values()]
        copies.take()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert all(torch.equal(a, b) for a, (_, b) in zip(before, copies.parameters(), strict=True))
        [kept] = copies.optimizers()
        assert [float(s["step"]) for s in kept["state"].values()] == steps == [number] * len(steps)
    assert copies.nbytes == sum(t.numel() * 4 for t in model.parameters()) * 3 + 2 * 4


def shared(recorder: AuxRecorder, position: Position) -> bytes:
    """A auxiliary state with that position."""
    recorder.extra = encode(position, b"\x90")
    recorder.capture(9, settled=True)
    data = recorder.read(9)
    assert data is not None
    return data


@pytest.mark.parametrize(
    ("others", "says"),
    [
        (Position(), []),
        (Position(stale=True), ["rank 1 ended inside a step that the others completed"]),
        (Position(extra=b"x"), ["TorchState(extra=...) of ranks [1] differs from that of rank 0"]),
    ],
    ids=["whole", "stale", "extra"],
)
def test_what_will_not_be_exact_is_noted(others: Position, says: list[str], recorders: list[AuxRecorder]) -> None:
    aux_states = {0: shared(recorders[0], Position(extra=b"mine")), 1: shared(recorders[1], others)}
    place = Place(rank=0, world_size=2, replicas=((0, 1),))
    found = notes_on(aux_states, place)
    assert len(found) == len(says)
    assert all(text in note for text, note in zip(says, found, strict=True))
    assert "no random state of rank 2" in " ".join(
        notes_on(aux_states, Place(rank=0, world_size=3, replicas=((0, 1, 2),)))
    )


@pytest.mark.parametrize(
    ("theirs", "named"),
    [(b"aaBBccDD", " in 'b', 'd', which"), (b"aaBB", ", which")],
    ids=["items", "other script"],
)
def test_the_items_of_extra_that_differ_are_named(theirs: bytes, named: str, recorders: list[AuxRecorder]) -> None:
    rows = Position(extra=b"aabbccdd"), Position(extra=theirs)
    aux_states = {rank: shared(recorders[rank], row) for rank, row in enumerate(rows)}
    [note] = notes_on(aux_states, Place(rank=0, world_size=2, replicas=((0, 1),)), "abcd")
    assert f"differs from that of rank 0{named}" in note


def test_what_was_added_to_a_checkpoint_is_as_good_as_saved(
    tmp_path: Path, recorders: list[AuxRecorder], caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 1 was cut off, and came second."""
    path = gasp_path(tmp_path, 7)
    place = Place(rank=0, world_size=2, replicas=((0, 1),))
    aux_states = {rank: aux(recorder) for rank, recorder in enumerate(recorders)}
    with Staged(path, LAYOUT) as staged:
        staged.open().write(b"the state")
        staged.publish(ManifestWriter("test", place).provenance(7, "gasp"))
    record = record_of({0: aux_states[0]}, place, True, {}, notes_on({0: aux_states[0]}, place))
    notes: list[str] = []
    other = replace(place, rank=1)
    assert aux_of(record, other, str(path), notes.append) is None
    assert notes == ["no random state of rank 1 was saved: a resume will not be bit-equal"]
    assert contribute(path, LAYOUT, {1: aux_states[1]}) == "the random state of rank 1 was added to it"
    with_added(record, path, LAYOUT)
    assert record["small"] == aux_states
    caplog.clear()
    for who in (place, other):
        assert aux_of(record, who, str(path), notes.append) is not None
    assert (len(notes), caplog.text) == (1, "")


def test_what_cannot_be_added_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert contribute(tmp_path / "gone.pt", LAYOUT, {1: b"x"}) == "no random state could be added to it"

    def full(*_: object) -> bool:
        raise OSError("No space left on device")

    monkeypatch.setattr("lastgasp.pytorch.staged.add", full)
    said = contribute(tmp_path / "gone.pt", LAYOUT, {1: b"x", 2: b"y"})
    assert "ranks 1, 2 could not be added (No space left on device): a resume will not be bit-equal" in said
