"""Traps of what is installed: versions that do not go together, packages that are not what they are called."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from lastgasp.backends import MINDIO_BESIDE, choose_backend, is_drop_in
from lastgasp.errors import ConfigError

from .checks import Match, check
from .machine import MINDIO_ITEMS, TFT_ITEMS, Machine, is_mindcluster

MINDSPORE_OF: dict[tuple[int, ...], tuple[int, ...]] = {
    (1, 3): (2, 4), (1, 6): (2, 7), (1, 7): (2, 7, 1), (1, 8): (2, 7, 2), (1, 9): (2, 9), (2, 0): (2, 10),
    (2, 1): (2, 11),
}  # fmt: skip
"""The MindSpore series that each MindFormers series needs (docs/facts/mindformers.md §0)."""
NOT_ON_PYPI = ((2, 4), (2, 11))
FRAMEWORKS = {
    "lightning": "lightning",
    "megatron-core": "megatron",
    "mindformers": "mindformers",
    "mindspore": "mindspore",
    "tensorflow": "tensorflow",
    "torch": "torch",
}
"""Distributions of what lastgasp has an adapter or a layout for, and their packages."""
_TOOLKITS = ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH")
_CANN = ("/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/cann")
_INSTALLED = "*-linux/ascend_toolkit_install.info"
FOR_MARKS = {
    "CANN": ((8, 2), "8.2.RC1"),
    "TaskD": ((7, 1), "7.1.RC1"),
    "MindSpore": ((2, 7), "2.7.0"),
}
"""The first versions with which TaskD collects step marks, as MindCluster's guide on slow nodes has them."""
LOADS_BACKENDS = (2, 5)
"""The torch from which on it loads torch_npu automatically."""


def frameworks(machine: Machine) -> dict[str, str]:
    """What is installed of `FRAMEWORKS`, with versions; a question mark for a package without metadata."""
    found = {name: machine.versions.get(name) or _unversioned(machine, name) for name in FRAMEWORKS}
    return {name: version for name, version in found.items() if version}


def _unversioned(machine: Machine, name: str) -> str:
    place = machine.places.get(FRAMEWORKS[name])
    # Some other directory may be called megatron: that is a namespace package.
    there = place is not None and (name != "megatron-core" or (place / "core").is_dir())
    return "?" if there else ""


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


@check("mindformers-mindspore", "error", "mindformers.md §0", "MindFormers and MindSpore that do not go together")
def mindformers_mindspore(machine: Machine) -> Iterator[Match]:
    """Each series has its own MindSpore."""
    needed = MINDSPORE_OF.get(machine.version("mindformers")[:2])
    found = machine.version("mindspore")
    if machine.has("mindformers") and "mindspore" not in machine.versions:
        yield Match("mindformers is installed without mindspore", _install_mindspore(needed or (2, 9)))
    elif needed is not None and found and found[: len(needed)] != needed:
        what = f"mindformers {machine.versions['mindformers']} needs mindspore {_dotted(needed)}, "
        yield Match(what + f"{machine.versions['mindspore']} is installed", _install_mindspore(needed))


def _install_mindspore(version: tuple[int, ...]) -> str:
    if version in NOT_ON_PYPI:
        other = "or take mindformers 1.9 with mindspore 2.9"
        return f"Install mindspore {_dotted(version)} from its makers' own site, as it is not on PyPI, {other}."
    return f"pip install 'mindspore=={_dotted(version)}{'.*' if len(version) == 2 else ''}'"


@check("hyper-parallel", "error", "mindformers.md §0", "MindFormers 2 without hyper_parallel")
def hyper_parallel(machine: Machine) -> Iterator[Match]:
    """It is not on PyPI."""
    if machine.version("mindformers")[:1] == (2,) and "hyper_parallel" not in machine.places:
        fix = "Clone gitcode.com/mindspore/hyper-parallel, and put its hyper_parallel on PYTHONPATH."
        yield Match("mindformers 2 needs hyper_parallel, which is not installed and not on PyPI", fix)


@check("mindspore-numpy", "error", "mindformers.md §0", "MindSpore up to 2.9 with numpy 2")
def mindspore_numpy(machine: Machine) -> Iterator[Match]:
    """Its wheels pin numpy below 2."""
    if (0,) < machine.version("mindspore") < (2, 10) and machine.version("numpy") >= (2,):
        what = (
            f"mindspore {machine.versions['mindspore']} needs numpy below 2, {machine.versions['numpy']} is installed"
        )
        yield Match(what, "pip install 'numpy<2'")


@check("mindspore-pyarrow", "warning", "mindformers.md §0", "A pyarrow that refuses numpy 1")
def mindspore_pyarrow(machine: Machine) -> Iterator[Match]:
    """19 to 23 go with numpy 1."""
    if machine.has("mindspore") and machine.version("numpy")[:1] == (1,) and machine.version("pyarrow") >= (24,):
        what = (
            f"pyarrow {machine.versions['pyarrow']} with numpy {machine.versions['numpy']}: newer ones refuse numpy 1"
        )
        yield Match(what, "pip install 'pyarrow>=19,<24'")


@check("torch-npu-torch", "error", "torchrun.md", "torch_npu of another torch")
def torch_npu_torch(machine: Machine) -> Iterator[Match]:
    """Each is built for one series."""
    npu, torch = machine.version("torch-npu"), machine.version("torch")
    if npu and torch and npu[:2] != torch[:2]:
        what = (
            f"torch_npu {machine.versions['torch-npu']} needs torch {_dotted(npu[:2])}.*, {machine.versions['torch']} "
        )
        yield Match(what + "is installed", f"pip install 'torch=={_dotted(npu[:2])}.*'")


@check("torch-npu-cann", "error", "torchrun.md", "torch_npu without CANN: importing torch fails")
def torch_npu_cann(machine: Machine) -> Iterator[Match]:
    """torch loads it automatically."""
    if not machine.has("torch-npu") or machine.env.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        return
    folders = [part for part in machine.env.get("LD_LIBRARY_PATH", "").split(":") if part]
    if any((machine.at(folder) / "libhccl.so").exists() for folder in folders) or _is_cached(machine, "libhccl.so"):
        return
    homes = [machine.env[name] for name in _TOOLKITS if machine.env.get(name)] + [*_CANN]
    there = [home for home in homes if (machine.at(home) / "lib64/libhccl.so").exists()]
    fails = "torch" if machine.version("torch")[:2] >= LOADS_BACKENDS else "torch_npu"
    if there:
        yield Match(f"torch_npu does not find CANN, so importing {fails} fails", f"source {there[0]}/set_env.sh")
    else:
        fix = "Install CANN, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0 to use torch without NPUs."
        yield Match(f"torch_npu is installed and CANN is not (no libhccl.so), so importing {fails} fails", fix)


@check("marks-versions", "warning", "taskd.md §6", "A version with which TaskD collects no step marks")
def marks_versions(machine: Machine) -> Iterator[Match]:
    """As MindCluster's guide has it. torch_npu's own number says nothing about the series that the guide means."""
    if not machine.taskd_job:
        return
    taskd, mindspore = machine.version("taskd"), machine.version("mindspore")
    found = {"CANN": _cann_version(machine), "TaskD": taskd, "MindSpore": mindspore}
    for name, (needed, text) in FOR_MARKS.items():
        version = found[name]
        if version and version < needed:
            what = f"{name} {_dotted(version)} is installed; TaskD collects step marks from {text} on"
            yield Match(what, f"Install {name} {text}, or have lastgasp write the files: do not preload libmspti.so.")


def _cann_version(machine: Machine) -> tuple[int, ...]:
    """As its installer has written it; empty where that is not to be found."""
    homes = [machine.env[name] for name in _TOOLKITS if machine.env.get(name)] + [*_CANN]
    for file in (path for home in homes for path in sorted(machine.at(home).glob(_INSTALLED))):
        try:
            found = re.search(r"^version=(\d+(?:\.\d+)*)", file.read_text(errors="replace"), re.MULTILINE)
        except OSError:
            continue
        if found:
            return tuple(int(part) for part in found[1].split("."))
    return ()


def _is_cached(machine: Machine, library: str) -> bool:
    """The loader knows it by ldconfig."""
    try:
        return library.encode() in machine.at("/etc/ld.so.cache").read_bytes()
    except OSError:
        return False


@check("torch-npu-cuda", "error", "torchrun.md", "torch_npu with a torch for CUDA")
def torch_npu_cuda(machine: Machine) -> Iterator[Match]:
    """It refuses two accelerators."""
    torch = machine.versions.get("torch", "")
    cuda = "+cu" in torch or any(one.startswith("nvidia-cuda") for one in machine.versions)
    if machine.has("torch-npu") and cuda and "+cpu" not in torch:
        fix = "Install the CPU build of torch beside torch_npu."
        yield Match("torch_npu refuses a torch for CUDA: two accelerators cannot be used at once", fix)


@check("lightning-series", "warning", "lightning.md", "A Lightning that the adapter was not tested with")
def lightning_series(machine: Machine) -> Iterator[Match]:
    """2.6 was measured, and 2.5 run."""
    for name in ("lightning", "pytorch-lightning"):
        found = machine.version(name)
        if found and found[:2] not in ((2, 5), (2, 6)):
            what = f"{name} {machine.versions[name]}: the adapter was run with 2.5 and 2.6; a fit refuses what differs"
            yield Match(what, f"pip install '{name}>=2.5,<2.7'")


@check("megatron-series", "warning", "megatron.md §7", "A Megatron that the adapter was not tested with")
def megatron_series(machine: Machine) -> Iterator[Match]:
    """0.19 was run."""
    found = machine.version("megatron-core")
    if found and found[:2] != (0, 19):
        what = f"megatron-core {machine.versions['megatron-core']}: the adapter was tested with 0.19.2"
        yield Match(what, "Run a short job with a fault first (LASTGASP_FAULT), or install 0.19.2.")


@check("backend", "error", "how-it-works.md §6", "LASTGASP_BACKEND asks for what is not there")
def backend(machine: Machine) -> Iterator[Match]:
    """As reported by `choose_backend`."""
    try:
        choose_backend(machine.env, machine.places.get)
    except ConfigError as error:
        what = f"LASTGASP_BACKEND={error.value}: expected {error.allowed}"
        yield Match(what, error.remedy)


@check("no-framework", "warning", "how-it-works.md §1", "No framework of any adapter is installed")
def no_framework(machine: Machine) -> Iterator[Match]:
    """Perhaps this is another environment than the job's."""
    if not frameworks(machine):
        what = "neither lightning, megatron-core, mindformers, mindspore, tensorflow nor torch is installed"
        yield Match(what, "Run doctor with the job's own Python: python -m lastgasp doctor.")


@check("ring-extension", "warning", "limits.md §1", "Step marks are written by Python")
def ring_extension(machine: Machine) -> Iterator[Match]:
    """About 1 us a mark instead of 0.1."""
    why = {"missing": "the C extension is not there", "other version": "the C extension is of another version",
           "switched off": "LASTGASP_PURE_PYTHON=1 is set"}.get(machine.ring)  # fmt: skip
    if why is not None:
        fix = "Unset it." if machine.ring == "switched off" else "Install lastgasp anew where there is a C compiler."
        yield Match(f"step marks cost about 1 us each instead of 0.1: {why}", fix)


@check("taskd-unrelated", "error", "taskd.md §1", "PyPI's taskd, which is not MindCluster's")
def taskd_unrelated(machine: Machine) -> Iterator[Match]:
    """The same name, a task runner. Elsewhere than on Ascend it does no harm."""
    place = machine.places.get("taskd")
    ascend = machine.in_mindcluster or machine.wanted == "ascend" or machine.npus > 0
    if place is None or is_mindcluster(place) or not ascend:
        return
    if is_drop_in(place):
        fix = "pip uninstall lastgasp-taskd, then install MindCluster's wheel."
        yield Match(f"taskd in {place} is lastgasp-taskd, which serves its names where there is no NPU", fix)
    else:
        fix = "pip uninstall taskd; MindCluster's comes as a wheel in its TaskD package."
        yield Match(f"taskd in {place} is the unrelated project of that name from PyPI", fix)


@check("taskd-torch", "warning", "taskd.md §2", "TaskD's patch of torchrun with torch 2.13 or newer")
def taskd_torch(machine: Machine) -> Iterator[Match]:
    """torch passes one argument more than the patch takes."""
    if machine.taskd is not None and machine.in_mindcluster and machine.version("torch") >= (2, 13):
        what = f"with torch {machine.versions['torch']} TaskD's own patch of torchrun fails before any worker starts"
        yield Match(
            what, "Start with lastgasp run, which tolerates it, instead of the sed line in torch/distributed/run.py."
        )


@check("mindio-twice", "error", "mindio_tft.md §1", "MindIO beside lastgasp-mindio, which has its names")
def mindio_twice(machine: Machine) -> Iterator[Match]:
    """They would take turns, so importing either is refused."""
    place, beside = machine.places.get("mindio_ttp"), machine.places.get(MINDIO_BESIDE)
    if place is not None and beside is not None and is_drop_in(place):
        what = f"importing mindio_ttp fails: lastgasp-mindio's is in {place}, MindCluster's in {beside}"
        yield Match(what, "pip uninstall lastgasp-mindio, and MindIO leads jobs on NPUs; or uninstall MindCluster's.")


@check("mindio-framework", "error", "mindio_tft.md §1", "MindIO without the framework that it imports")
def mindio_framework(machine: Machine) -> Iterator[Match]:
    """torch_npu, or MindSpore with a switch."""
    mindspore = machine.env.get("MINDIO_FOR_MINDSPORE", "").lower() in ("true", "1")
    if machine.mindio and mindspore and "mindspore" not in machine.places:
        yield Match("MINDIO_FOR_MINDSPORE is set and mindspore is not installed", "Install mindspore, or unset it.")
    elif machine.mindio and not mindspore and "torch_npu" not in machine.places:
        other = "mindspore" in machine.places
        fix = "Set MINDIO_FOR_MINDSPORE=1." if other else "Install torch_npu, or mindspore with MINDIO_FOR_MINDSPORE=1."
        yield Match("mindio_ttp cannot be imported: it wants torch_npu unless MINDIO_FOR_MINDSPORE=1", fix)


@check("tft-spelling", "error", "mindformers.md §3", "MS_ENABLE_TFT with an item that is not spelled TTP:1")
def tft_spelling(machine: Machine) -> Iterator[Match]:
    """It is looked for as plain text."""
    text = machine.env.get("MS_ENABLE_TFT", "")
    lost = [one for one in TFT_ITEMS if re.search(rf"\b{one}\b(?!:\d)", text)]
    if lost:
        what = f"MS_ENABLE_TFT={text!r} does not switch {', '.join(lost)} on: MindSpore looks for {lost[0]}:1 as text"
        items = ",".join(f"{one}:1" for one in TFT_ITEMS if one in lost or one in machine.tft)
        yield Match(what, f"Write {{{items}}}.")


@check("tft-without-npu", "error", "mindformers.md §3", "MS_ENABLE_TFT for MindIO on a machine without NPUs")
def tft_without_npu(machine: Machine) -> Iterator[Match]:
    """MindSpore refuses it when training begins."""
    items = [one for one in MINDIO_ITEMS if one in machine.tft]
    if items and not machine.npus:
        fix = "Unset it: lastgasp's embedded engine does without, and lastgasp run sets RSC:1 automatically."
        yield Match(f"MS_ENABLE_TFT asks for {', '.join(items)}, and this machine has no NPU: MindSpore refuses", fix)


@check("tft-env", "error", "mindformers.md §3", "MS_ENABLE_TFT for MindIO without what MindSpore reads besides")
def tft_env(machine: Machine) -> Iterator[Match]:
    """The address and port of MindIO's controller, and its package."""
    if not (machine.tft & set(MINDIO_ITEMS) and machine.npus):
        return
    missing = [name for name in ("MS_TFT_IP", "MS_TFT_PORT") if not machine.env.get(name)]
    if missing:
        what = f"MS_ENABLE_TFT drives MindIO, and {' and '.join(missing)} is not set"
        yield Match(what, "export MS_TFT_IP=$MS_SCHED_HOST MS_TFT_PORT=$TTP_PORT")
    if not machine.mindio:
        what = "MS_ENABLE_TFT drives MindIO, and mindio_ttp is not installed for this Python"
        yield Match(what, "Install the wheel of MindCluster's MindIO TFT, or unset MS_ENABLE_TFT.")


@check("ms-graceful-exit", "warning", "mindformers.md §7", "MindSpore's OnRequestExit takes SIGTERM")
def ms_graceful_exit(machine: Machine) -> Iterator[Match]:
    """It replaces whatever handler there is."""
    if machine.env.get("MS_ENABLE_GRACEFUL_EXIT") == "1":
        what = "MS_ENABLE_GRACEFUL_EXIT=1: OnRequestExit takes SIGTERM and saves a file that cannot be resumed from"
        yield Match(what, "Unset it; lastgasp saves at SIGTERM and at reset.json's GracefulExit.")


def preloaded(machine: Machine) -> list[str]:
    """The entries of LD_PRELOAD."""
    return [one for one in re.split(r"[: ]+", machine.env.get("LD_PRELOAD", "")) if one]


@check("preload-absent", "warning", "taskd.md §6", "LD_PRELOAD names a library that is not there")
def preload_absent(machine: Machine) -> Iterator[Match]:
    """The loader says so on every start, and goes on without. It replaces $LIB and its like itself."""
    for one in preloaded(machine):
        if "/" in one and "$" not in one and not machine.at(one).exists():
            yield Match(f"LD_PRELOAD names {one}, which does not exist", "Correct the path.")


@check("preload-missing", "error", "taskd.md §1, §6", "TaskD without libmspti.so and libtaskd.so preloaded")
def preload_missing(machine: Machine) -> Iterator[Match]:
    """Workers then never register, although every call returns True."""
    given = {Path(one).name for one in preloaded(machine) if "/" not in one or machine.at(one).exists()}
    missing = [one for one in ("libmspti.so", "libtaskd.so") if one not in given]
    if machine.taskd_job and missing:
        what = f"{' and '.join(missing)} not in LD_PRELOAD: TaskD's workers do not register, and mark nothing"
        fix = "source CANN's set_env.sh, and export LD_PRELOAD before the start."
        yield Match(what, fix if "libmspti.so" in missing else "export LD_PRELOAD before the start.")


@check("taskd-library", "error", "taskd.md §1", "TaskD without its library")
def taskd_library(machine: Machine) -> Iterator[Match]:
    """It is imported all the same, and every call returns False."""
    if machine.taskd is not None and machine.wanted != "embedded" and not machine.found.taskd:
        yield Match(f"there is no libtaskd.so in {machine.taskd}: every call of TaskD's returns False", "Reinstall it.")


@check("slow-load", "warning", "limits.md §4", "A setting with which torch loads checkpoints four times slower")
def slow_load(machine: Machine) -> Iterator[Match]:
    """Huge pages, of which each is cleared at its first touch."""
    if machine.env.get("THP_MEM_ALLOC_ENABLE") == "1":
        yield Match("THP_MEM_ALLOC_ENABLE=1 makes torch.load four times slower (measured)", "Unset it.")
