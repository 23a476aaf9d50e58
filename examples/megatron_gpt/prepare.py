"""Real text for Megatron without a download: the topics of Python's own help, in Megatron's indexed format.

`python prepare.py DIR` writes `DIR/topics.bin`, `DIR/topics.idx` and `DIR/vocabulary.json`.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path
from pydoc_data.topics import topics

import megatron_on_cpu

WORDS = 511
"""Tokens of text: every character that occurs, and the most frequent words. One more ends a document."""
END = WORDS


def vocabulary(texts: list[str]) -> list[str]:
    """The tokens; the place of each is its number."""
    characters = sorted(set("".join(texts)))
    words = Counter(word for text in texts for word in _pieces(text) if len(word) > 1)
    return [*characters, *(word for word, _ in words.most_common(WORDS - len(characters)))]


def tokens(text: str, numbers: dict[str, int]) -> list[int]:
    """Words that are not in the vocabulary are spelled."""
    found: list[int] = []
    for piece in _pieces(text):
        found += [numbers[piece]] if piece in numbers else [numbers[character] for character in piece]
    return found


def _pieces(text: str) -> list[str]:
    return re.findall(r" ?\w+|\s+|[^\w\s]", text)


def main(directory: Path) -> None:
    """Write the three files."""
    megatron_on_cpu.apply()
    import numpy
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    texts = [text for _, text in sorted(topics.items())]
    words = vocabulary(texts)
    numbers = {word: number for number, word in enumerate(words)}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "vocabulary.json").write_text(json.dumps(words))
    builder = IndexedDatasetBuilder(str(directory / "topics.bin"), dtype=numpy.uint16)
    count = 0
    for text in texts:
        document = [*tokens(text, numbers), END]
        count += len(document)
        builder.add_item(torch.tensor(document))
        builder.end_document()
    builder.finalize(str(directory / "topics.idx"))
    print(f"{len(texts)} documents, {count} tokens of {len(words) + 1} in {directory}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
