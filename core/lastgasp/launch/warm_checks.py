"""Whether a process may be forked, and by what it would do harm. Runs in the warm process; computes nothing."""

from __future__ import annotations

import ctypes
import os
import random
import re
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any
from weakref import WeakSet

from lastgasp.gasp.imported import LIBRARIES, is_installed, origin

HARMLESS = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
DEVICES = ("/dev/nvidia", "/dev/davinci", "/dev/hisi", "/dev/kfd", "/dev/dri/", "/dev/infiniband/", "/dev/accel")
READ_AGAIN = frozenset(
    {"lightning.fabric.utilities.rank_zero", "lightning_fabric.utilities.rank_zero", "torchmetrics.utilities.prints"}
)
"""Modules that take a rank from the environment when they are imported, and whose value is renewed in the child
(`warm_child.renew_ranks`)."""
LEFT_BEHIND = frozenset({"jemalloc_bg_thd"})
"""Names of threads that do no harm to a fork. That of jemalloc, which comes with pyarrow and so with `datasets` and
Trainer, gives memory back: jemalloc holds all its locks while a process forks, and a child does without it."""
NVML = re.compile(r"cuda[0-9a-f]{11}")
"""Names of the thread that NVML leaves behind when it is closed (`close_nvml`; driver 580): no device is open by then,
and children of a process that has one were seen to use the GPU."""
NVML_OPENED = 10_000
"""How often imports may have opened it."""
BY_PREFIX = {"tqdm.std": "TQDM_", "fsspec.config": "FSSPEC_", "networkx": "NETWORKX_",
             "diffusers.utils.import_utils": "COLAB_"}  # fmt: skip
"""Modules that go through all variables when they are imported, and how the names begin that they take."""
AT_LOADING = (
    "OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "BLIS_", "NUMEXPR_", "MALLOC_", "PYTORCH_", "ATEN_",
    "TORCH_ALLOW_", "TORCH_BLAS_", "TORCH_LINALG_", "TORCH_CPP_", "TORCH_DISTRIBUTED_",
)  # fmt: skip
"""Native libraries read variables with such names when they are loaded, which `watching_environment` does not see."""


UNSEEDED: WeakSet[random.Random] = WeakSet()
"""Generators that imports have made without a seed: in a fresh interpreter each begins anywhere, and so they do in the
child (`warm_child.renew_seeds`)."""
TEMPORARY: list[str | None] = []
"""Paths of temporary files and folders that imports have made; None for one whose place is not known."""


def threads() -> int:
    """How many threads this process has, those of native libraries too, but for those that a fork may leave behind."""
    names = map(_name_of, os.listdir("/proc/self/task"))
    return sum(name not in LEFT_BEHIND and not NVML.fullmatch(name) for name in names)


def _name_of(thread: str) -> str:
    try:
        with open(f"/proc/self/task/{thread}/comm") as file:
            return file.read().rstrip("\n")
    except OSError:  # it has ended
        return ""


def files() -> dict[int, str]:
    """What this process has open, by descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # that of the listing itself
            pass
    return found


def _is_library(number: int, name: str) -> bool:
    """Whether it is open for reading alone and its code is loaded: newer libffi keeps itself open for its closures."""
    try:
        with open(f"/proc/self/fdinfo/{number}") as info, open("/proc/self/maps") as maps:
            flags = next(line.split()[1] for line in info if line.startswith("flags:"))
            loaded = {line.split(maxsplit=5)[5].strip() for line in maps if "/" in line and "x" in line.split()[1]}
    except (OSError, StopIteration):
        return False
    return int(flags, 8) & os.O_ACCMODE == os.O_RDONLY and name in loaded


def children() -> str:
    """Process ids of the children, separated by blanks."""
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return file.read().strip()


def unsafe(own: Collection[int]) -> str:
    """Why this process must not be forked now; empty when it may.

    Args:
        own: descriptors that the child closes, or gets its own of.
    """
    more = {
        number: name for number, name in files().items()
        if number not in own and name not in HARMLESS and not _is_library(number, name)
    }  # fmt: skip
    devices = [name for name in more.values() if name.startswith(DEVICES)]
    if devices or _device_in_use():
        return f"an import has opened a device ({', '.join(devices) or 'torch has initialized one'})"
    if threads() > 1:
        return "an import has started a thread"
    if children():
        return "an import has started a process"
    if more:
        return f"an import keeps a file or a connection open ({', '.join(sorted(more.values())[:3])})"
    if any(path is None or os.path.lexists(path) for path in TEMPORARY):
        return "an import has made a temporary file, which its ranks would share"
    return ""


def close_nvml() -> None:
    """Close what torch leaves open where it was asked for a GPU (`warm.WITHOUT_DEVICE`): each question opens NVML anew.

    Left alone where pynvml holds it for an import, which would miss it.
    """
    with open("/proc/self/maps") as maps:
        loaded = any("/libnvidia-ml.so" in line for line in maps)
    if not loaded or getattr(sys.modules.get("pynvml"), "_nvmlLib_refcount", False):
        return
    library = ctypes.CDLL("libnvidia-ml.so.1")
    for _ in range(NVML_OPENED):  # one for each nvmlInit; a stand-in for the library may never say that it is closed
        if library.nvmlShutdown() != 0:
            break


def times(modules: Mapping[str, str]) -> dict[str, int]:
    """Of the last change of each folder of packages, and of what has been imported from elsewhere: the user's files.

    Args:
        modules: names with origins.
    """
    packages = [path for path in sys.path if os.path.basename(path) in LIBRARIES]
    others = [path for path in modules.values() if os.path.isabs(path) and not is_installed(path)]
    return {path: os.stat(path).st_mtime_ns for path in (*packages, *others) if os.path.exists(path)}


def changed_since(known: Mapping[str, int]) -> str:
    """Which of these has changed on disk, in words; or empty."""
    for path, time in known.items():
        if not os.path.exists(path) or os.stat(path).st_mtime_ns != time:
            return f"{path} has changed since it was imported"
    return ""


def differing(modules: Mapping[str, str]) -> str:
    """Which module here comes from another file than in the rank that reported, in words; or empty."""
    for name, path in modules.items():
        here = origin(sys.modules[name]) if name in sys.modules and name != "__main__" else path
        if here != path and not _is_second_name(name, path, modules):
            return f"{name} is {path or 'no file'} in the ranks, and {here or 'no file'} to other imports"
    return ""


def _is_second_name(name: str, path: str, modules: Mapping[str, str]) -> bool:
    """Cython gives the module that an extension package shares (`_cyutility`) one name more.

    Of several packages, the one that is imported first has it; its extensions import their own by its full name.
    """
    spec = getattr(sys.modules[name], "__spec__", None)
    known = spec is not None and spec.name != name and sys.modules.get(spec.name) is sys.modules[name]
    return known and any(other != name and there == path for other, there in modules.items())


def fork_once() -> str:
    """Fork a child that ends at once; why its children must not train, or empty.

    Libraries that look after forks (OpenBLAS) end their threads before one, and start them again when they need them.
    """
    pid = os.fork()
    if pid == 0:
        os._exit(int(_device_is_broken()))
    _, status = os.waitpid(pid, 0)
    return "an import has initialized a device, which a fork would break" if status else ""


def _device_in_use() -> bool:
    return any(module.is_initialized() for module in _devices())


def _device_is_broken() -> bool:
    return any(getattr(module, "_is_in_bad_fork", bool)() for module in _devices())


def _devices() -> Iterator[Any]:
    torch = sys.modules.get("torch")
    for name in ("cuda", "npu", "xpu"):
        module = getattr(torch, name, None)
        if module is not None and hasattr(module, "is_initialized"):
            yield module


@contextmanager
def watching_environment(names: Collection[str]) -> Iterator[list[tuple[str, str]]]:
    """Notice which modules read one of these variables when they are imported: module and variable.

    Who goes through all variables reads each, also one that is not set here; but for those of `BY_PREFIX`.
    """
    found: list[tuple[str, str]] = []
    kind = type(os.environ)
    get, iterate = kind.__getitem__, kind.__iter__

    def getitem(self: Any, name: str) -> Any:
        if name in names and (reader := importing(sys._getframe(1))):
            found.append((reader, name))
        return get(self, name)

    def iter_all(self: Any) -> Iterator[Any]:
        if reader := importing(sys._getframe(1)):
            found.extend((reader, name) for name in names if name.startswith(BY_PREFIX.get(reader, "")))
        return iterate(self)

    kind.__getitem__, kind.__iter__ = getitem, iter_all  # type: ignore[method-assign]
    try:
        yield found
    finally:
        kind.__getitem__, kind.__iter__ = get, iterate  # type: ignore[method-assign]


@contextmanager
def watching_seeds() -> Iterator[None]:
    """Notice in `UNSEEDED` which generators of `random` are made without a seed."""
    original = random.Random.seed

    def seed(self: random.Random, a: Any = None, version: int = 2) -> None:
        original(self, a, version)
        (UNSEEDED.add if a is None else UNSEEDED.discard)(self)

    random.Random.seed = seed  # type: ignore[method-assign]
    try:
        yield
    finally:
        random.Random.seed = original  # type: ignore[method-assign]


@contextmanager
def watching_temporary() -> Iterator[None]:
    """Notice in `TEMPORARY` what is made by `tempfile`. Most is gone once it has been used, as what Triton compiles."""
    before, tempfile._name_sequence = tempfile._name_sequence, _Names()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        tempfile._name_sequence = before  # type: ignore[attr-defined]


class _Names(tempfile._RandomNameSequence):  # type: ignore[name-defined,misc]
    def __next__(self) -> str:
        name: str = super().__next__()
        there = sys._getframe(1).f_locals  # of `tempfile`'s own function, or of who takes a name for something else
        before, behind = there.get("prefix", there.get("pre")), there.get("suffix", there.get("suf"))
        known = isinstance(before, str) and isinstance(behind, str) and isinstance(there.get("dir"), str)
        TEMPORARY.append(os.path.join(there["dir"], f"{before}{name}{behind}") if known else None)
        return name


def importing(frame: FrameType | None) -> str:
    """The innermost module whose top level is running."""
    while frame is not None:
        if frame.f_code.co_name == "<module>":
            return str(frame.f_globals.get("__name__", ""))
        frame = frame.f_back
    return ""
