"""The error tree, as others pass it on."""

from __future__ import annotations

import copy
import pickle

import pytest

from lastgasp import errors
from lastgasp.adapter import HookNotPlaced

ERRORS = [
    errors.ConfigError("strategy", "RayDDPStrategy", "'ddp'", "Use strategy='ddp'."),
    errors.MissingExtra("torch", "pytorch"),
    errors.DamagedCheckpoint("step=1.pt", ["bytes 0-4: changed"]),
    errors.NoGoodCheckpoint("ckpts", {"ckpts/step=1.pt": "truncated"}),
    errors.NothingLoads("ckpts", {"ckpts/step=1.pt": "another model"}),
    errors.CheckpointMismatch("step=1.pt", ["net.weight: (2, 2), not (3, 3)"]),
    errors.DeadlineExceeded("the other ranks", 3.0, "Look at their logs."),
    errors.UsageError("only one session can be open"),
    HookNotPlaced("Trainer.train", "(self)", "Install another one."),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_comes_out_of_another_process_as_it_was_raised(error: errors.LastgaspError) -> None:
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is type(error)
        assert str(other) == str(error)
        assert vars(other) == vars(error)
        assert other.args == error.args
