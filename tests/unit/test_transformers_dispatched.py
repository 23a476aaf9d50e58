"""What accelerate's dispatcher reads below for one batch, by which a resume counts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("transformers")
import torch
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard

from lastgasp_transformers.run import reads_of


@pytest.mark.parametrize(("split", "reads"), [(False, 2), (True, 1)])
def test_rank_0_reads_the_batches_of_all_ranks(split: bool, reads: int) -> None:
    loader = object.__new__(DataLoaderDispatcher)
    loader.split_batches, loader.state = split, SimpleNamespace(num_processes=2)
    assert reads_of(loader) == reads


def test_any_other_loader_reads_its_own() -> None:
    assert reads_of(DataLoaderShard(torch.zeros(4))) == 1
