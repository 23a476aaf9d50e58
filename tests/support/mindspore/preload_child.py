"""Loads checkpoints in one pass on the real MindSpore and says what came of it, as one JSON line. `FOLDER` is empty."""

from __future__ import annotations

import functools
import json
import sys
import threading
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore.train import serialization

from lastgasp.adapter.mindspore import PLAIN
from lastgasp.checkpoint import Candidate, Provenance, World, candidates, verify
from lastgasp.checkpoint.adopt import read_entries, write_manifest
from lastgasp.errors import DamagedCheckpoint
from lastgasp.topology import Place, data_parallel
from lastgasp_mindformers.preload import FilePreload, parse

FOLDER = Path(sys.argv[1])
FILE, OTHER = FOLDER / "net-1_4.ckpt", FOLDER / "other.ckpt"
RANK = Place(rank=0, world_size=1, replicas=data_parallel(1))


def values(seed: int) -> dict[str, np.ndarray[Any, Any]]:
    """Parameters of several types, more than one chunk of digests in all."""
    draw = np.random.default_rng(seed)
    return {
        "weight": draw.standard_normal((1500, 1500)).astype(np.float32),
        "half": draw.standard_normal(77).astype(np.float16),
        "step_num": np.array(4, np.int32),
        "epoch_num": np.array(1, np.int32),
    }


def save(path: Path, seed: int) -> None:
    ms.save_checkpoint([{"name": n, "data": ms.Tensor(v)} for n, v in values(seed).items()], str(path))


def bits(loaded: Any) -> dict[str, list[str]]:
    return {n: [str(p.dtype), str(p.shape), p.asnumpy().tobytes().hex()[:4096]] for n, p in loaded.items()}


def found() -> Candidate:
    """With its manifest."""
    (one,) = (c for c in candidates([FOLDER], PLAIN) if c.path == FILE)
    assert one.manifest is not None
    return one


def passed(preload: FilePreload) -> tuple[list[str], Any]:
    """What is wrong with the file, and what was loaded of it meanwhile."""
    candidate = found()
    verdict = preload.verdict(candidate, functools.partial(verify, FILE, PLAIN, manifest=candidate.manifest))
    return verdict.reasons, preload.take(FILE)


def main() -> None:
    save(FILE, 1)
    made_by = Provenance(
        format="mindspore", step=4, kind="periodic", job="x", world=World(world_size=1, replica_groups=data_parallel(1))
    )
    write_manifest(FILE, PLAIN, made_by, read_entries(FILE, PLAIN))
    save(OTHER, 2)
    told: dict[str, Any] = {}
    expected, opener = bits(ms.load_checkpoint(str(FILE))), serialization._ckpt_fs.open
    preload = FilePreload(lambda candidate, rank: candidate.path, RANK)

    reasons, loaded = passed(preload)
    told["whole"] = [reasons, bits(loaded) == expected, preload.take(FILE) is None]

    # Another thread loads another file, and this very one, meanwhile: both are its own business.
    seen = list[Any]()
    thread = threading.Thread(target=lambda: seen.extend(bits(ms.load_checkpoint(str(path))) for path in (OTHER, FILE)))
    thread.start()
    entries = found().manifest.files  # type: ignore[union-attr]
    ours = [bits(parse(FILE, entries[0])) == expected for _ in range(5)]
    thread.join()
    told["threads"] = [all(ours), seen[1] == expected, seen[0]["weight"] != expected["weight"]]

    content = FILE.read_bytes()
    for name, at in {"first": 3, "middle": len(content) // 2, "last": len(content) - 1}.items():
        FILE.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        try:
            parse(FILE, entries[0])
            raised = False
        except DamagedCheckpoint:
            raised = True
        told[name] = [raised, *(bool(part) for part in passed(preload))]
    FILE.write_bytes(content)

    told["put back"] = serialization._ckpt_fs.open is opener or serialization._ckpt_fs.open == opener
    real, serialization._ckpt_fs = serialization._ckpt_fs, None  # a MindSpore that reads in another way
    reasons, loaded = passed(preload)
    told["other insides"] = [reasons, loaded is None]
    serialization._ckpt_fs = real
    print(json.dumps(told))


if __name__ == "__main__":
    main()
