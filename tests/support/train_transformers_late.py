"""A rank that is told to stop within Trainer's own save, and comes to its next file when the gasp is there."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # as a script of its own
from transformers import Trainer

from lastgasp_transformers import LastGasp
from support.train_transformers import Tokens, arguments, model

FOLDER = Path(sys.argv[1])


class Late(Trainer):  # type: ignore[misc,unused-ignore]
    """Rank 1 is, before it writes its random state."""

    def _save_scaler(self, output_dir: str) -> None:
        super()._save_scaler(output_dir)
        if self.args.process_index == 1 and self.state.global_step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
            end = time.monotonic() + 60
            while not (FOLDER / "checkpoint-4.manifest.json").exists() and time.monotonic() < end:
                time.sleep(0.001)
            (FOLDER / "late").touch()


if __name__ == "__main__":
    Late(model(), arguments(str(FOLDER), "plain"), train_dataset=Tokens(24), eval_dataset=Tokens(8),
         callbacks=[LastGasp()]).train()  # fmt: skip
