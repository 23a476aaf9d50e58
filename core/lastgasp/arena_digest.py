"""The digest of a payload in an arena: xxh3-128 by chunks, computed while copying and checked by several threads.

The digests of all chunks are digested with identity, step and length, so a payload is verified as a whole.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import xxhash

CHUNK = 4 << 20
"""Bytes of which each has a digest of its own."""
THREADS = 4
"""At most: with more the memory is what limits."""
ALONE = 32 << 20
"""Below this many bytes a thread costs more than it gains."""


def threads() -> int:
    """How many may work on one payload at once."""
    return min(THREADS, len(os.sched_getaffinity(0)))


class Digest:
    """Of a payload that comes part by part.

    Args:
        identity: of the arena; step: that is copied. Both are part of the digest.
    """

    def __init__(self, identity: bytes, step: int) -> None:
        self._identity, self._step, self._length = identity, step, 0
        self._chunk, self._chunks = xxhash.xxh3_128(), list[bytes]()

    def update(self, part: memoryview) -> None:
        """The next bytes."""
        done = 0
        while done < len(part):
            now = part[done : done + CHUNK - self._length % CHUNK]
            self._chunk.update(now)
            self._length += len(now)
            done += len(now)
            if self._length % CHUNK == 0:
                self._chunks.append(self._chunk.digest())
                self._chunk.reset()

    def end(self) -> bytes:
        """All bytes have come."""
        last = [self._chunk.digest()] if self._length % CHUNK else []
        return _whole(self._identity, self._step, [*self._chunks, *last], self._length)


class Check:
    """The digest of a payload that is there, computed by threads beside the caller; a small one when it is asked for.

    At the end of the `with` block nothing reads the payload any more.

    Args:
        payload, identity, step: as they were copied.
    """

    def __init__(self, payload: memoryview, identity: bytes, step: int) -> None:
        self._payload, self._identity, self._step = payload, identity, step
        self._starts = range(0, len(payload), CHUNK)
        self._found: dict[int, bytes] = {}
        self._stopped = False
        self._jobs: list[Future[None]] = []
        count = threads()
        if len(payload) < ALONE:
            return
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="lastgasp-arena")
        try:
            self._jobs = [self._pool.submit(self._work, self._starts[first::count]) for first in range(count)]
        except RuntimeError:  # the interpreter is shutting down: `result` does what no thread has done
            pass
        self._pool.shutdown(wait=False)

    def _work(self, starts: Iterable[int]) -> None:
        for begin in starts:
            if self._stopped:
                return
            self._found[begin] = xxhash.xxh3_128_digest(self._payload[begin : begin + CHUNK])

    def result(self) -> bytes:
        """Wait for it."""
        for job in self._jobs:
            job.result()
        self._work(begin for begin in self._starts if begin not in self._found)
        return _whole(self._identity, self._step, (self._found[at] for at in self._starts), len(self._payload))

    def __enter__(self) -> Check:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped = True
        for job in self._jobs:
            job.result()


def _whole(identity: bytes, step: int, chunks: Iterable[bytes], length: int) -> bytes:
    hasher = xxhash.xxh3_128(identity + struct.pack("<q", step))
    for digest in chunks:
        hasher.update(digest)
    hasher.update(struct.pack("<q", length))
    return hasher.digest()
