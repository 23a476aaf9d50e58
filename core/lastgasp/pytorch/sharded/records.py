"""What `torch.save` puts around the bytes of one tensor, so that the bytes can be written from where they lie.

`torch.distributed.checkpoint` stores each tensor as the file that `torch.save` makes of it. Everything in that file but
the bytes follows from type, shape and strides; checksums are left out (`lastgasp.pytorch.io.without_crc32`).
"""

from __future__ import annotations

import io
import os
from functools import lru_cache
from typing import IO, Any, cast

import torch

from lastgasp.pytorch.io import without_crc32


class _Outline:
    """A file that keeps what is written, and the one gap that is skipped."""

    def __init__(self) -> None:
        self.before, self.after = bytearray(), bytearray()
        self.gap = -1

    def write(self, data: Any) -> int:
        """As a file's."""
        view = memoryview(data).cast("B")
        (self.before if self.gap < 0 else self.after).extend(view)
        return len(view)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """torch skips the bytes of a storage by this."""
        if whence != os.SEEK_CUR or self.gap >= 0:
            raise OSError("torch.save was expected to skip the bytes of one storage")
        self.gap = offset
        return len(self.before) + offset

    def flush(self) -> None:
        """Nothing waits."""


@lru_cache(maxsize=4096)
def around(dtype: torch.dtype, sizes: tuple[int, ...], strides: tuple[int, ...]) -> tuple[bytes, bytes]:
    """What comes before and after the bytes of such a tensor.

    Args:
        strides: of dense memory; empty for the usual ones.

    Raises:
        RuntimeError: torch writes files of another form.
    """
    if not torch.Size(sizes).numel():
        return stored(torch.empty(sizes, dtype=dtype)), b""
    tensor = torch.empty_strided(sizes, strides, dtype=dtype) if strides else torch.empty(sizes, dtype=dtype)
    outline = _Outline()
    with without_crc32(), torch.serialization.skip_data():
        torch.save(tensor, cast("IO[bytes]", outline))
    if outline.gap != tensor.nbytes:
        raise RuntimeError(f"torch.save skipped {outline.gap} bytes of a tensor of {tensor.nbytes}")
    return bytes(outline.before), bytes(outline.after)


def stored(value: Any) -> bytes:
    """The file that `torch.save` makes of any value."""
    file = io.BytesIO()
    with without_crc32():
        torch.save(value, file)
    return file.getvalue()
