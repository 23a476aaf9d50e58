"""Real text without a download: the topics of Python's own help, byte by byte, as a MindRecord file.

`python text_to_mindrecord.py DIR [SAMPLES [LENGTH]]` writes `DIR/train.mindrecord`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from pydoc_data.topics import topics

FIRST = 3
"""Numbers below are LLaMA's padding, begin and end."""


def write(path: Path, samples: int, length: int) -> None:
    """`samples` pieces of `length` tokens and one more, which is the last one's label."""
    import numpy
    from mindspore.mindrecord import FileWriter

    text = "".join(text for _, text in sorted(topics.items())).encode()
    tokens = numpy.frombuffer(text, numpy.uint8).astype(numpy.int32) + FIRST
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = FileWriter(str(path), 1, overwrite=True)
    writer.add_schema({"input_ids": {"type": "int32", "shape": [-1]}}, "tokens")
    writer.write_raw_data([{"input_ids": tokens[at : at + length + 1]} for at in range(0, samples * length, length)])
    writer.commit()


if __name__ == "__main__":
    numbers = [int(number) for number in sys.argv[2:]]
    write(Path(sys.argv[1], "train.mindrecord"), *(numbers + [480, 32][len(numbers) :]))
