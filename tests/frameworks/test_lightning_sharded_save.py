"""What `ModelParallelStrategy` saves where the ranks cannot agree on it: it costs that checkpoint, not the training."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lastgasp._fs import host_tag
from lastgasp.checkpoint import DirectoryLayout, candidates, verify
from lastgasp.checkpoint.writer import ManifestWriter
from lastgasp.config import GaspConfig
from lastgasp.session import Session
from lastgasp.topology import Place
from lastgasp_lightning.checkpoint_io import VerifiedCheckpointIO
from lastgasp_lightning.sharded_io import ShardedCheckpoints

LAYOUT = DirectoryLayout("*.ckpt")
PLACE = Place(rank=0, world_size=2, replicas=((0,), (1,)))


class Job:
    """Rank 0 of two. The other one has nothing to add; `led` says whether the controller lives."""

    def __init__(self, folder: Path) -> None:
        self.led, self._folder = True, folder
        processor = SimpleNamespace(gather=self._together, led=True)
        self._session = SimpleNamespace(place=PLACE, has_controller=True, _processor=processor)
        status = SimpleNamespace(progress=lambda phase: None, durable=0)
        config = GaspConfig.resolve(folder)
        original = SimpleNamespace(remove_checkpoint=lambda path: None)
        writer = ManifestWriter("lightning", PLACE)
        self.io = VerifiedCheckpointIO(original, config, writer, status, [folder])  # type: ignore[arg-type]
        run: Any = SimpleNamespace(
            trainer=SimpleNamespace(strategy=SimpleNamespace(broadcast=lambda value: value)),
            session=SimpleNamespace(status=status), life=SimpleNamespace(gather_saved=self._gather),
            place=PLACE, tuning=SimpleNamespace(active=False), config=config, writer=writer,
        )  # fmt: skip
        self._ours = ShardedCheckpoints(run, self.io)

    def _together(self, tag: str, payload: bytes, *limits: float) -> Any:
        self._session._processor.led = self.led
        empty = payload[:0] if tag.endswith("done") else b"\x82\xa7entries\x90\xa7problem\xa0"
        return SimpleNamespace(missing="", parts=[payload, empty]) if self.led else None

    def _gather(self, tag: str, payload: bytes) -> list[bytes]:
        return Session.gather(self._session, tag, payload)  # type: ignore[arg-type]

    def save(self, step: int) -> Path:
        """As Trainer.save_checkpoint does."""
        path = self._folder / f"step={step}.ckpt"
        self._ours._save(_write, {"global_step": step, "lastgasp": {"step": step}}, path)
        return path

    def steps(self) -> list[int]:
        """Of all that verify."""
        return sorted(c.step or 0 for c in candidates([self._folder], LAYOUT) if verify(c.path, LAYOUT).ok)


def _write(checkpoint: dict[str, Any], path: Path, options: Any) -> None:
    path.mkdir()
    (path / "__0_0.distcp").write_bytes(b"shard")


def test_a_save_on_which_ranks_cannot_agree_costs_that_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(tmp_path)
    first = job.save(100)
    assert (job.steps(), job.io.failed) == ([100], None)
    job.led = False
    job.save(200)
    assert "the controller was lost while the ranks agreed" in caplog.text
    assert "training continues; older ones remain" in caplog.text
    assert [path.name for path in tmp_path.iterdir() if "200" in path.name] == []
    job.io.remove_checkpoint(first)  # by ModelCheckpoint, which takes 200 for written
    assert job.steps() == [100]
    assert "step=100.ckpt stays until another one is written" in caplog.text


def test_what_a_rank_has_left_that_was_replaced_in_its_save_goes_with_the_next_checkpoint(tmp_path: Path) -> None:
    """No start comes that would find it."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    left = tmp_path / f".step=50.ckpt.tmp-{child.pid}-{host_tag()}012345"
    left.mkdir()
    (left / "__0_0.distcp").write_bytes(b"half of a sh")
    job = Job(tmp_path)
    job.save(100)
    assert job.steps() == [100]
    assert not left.exists()
