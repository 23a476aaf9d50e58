"""A forked rank: makes the child of a warm process what a fresh interpreter would be, and runs the user's program."""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import importlib.machinery
import io
import json
import multiprocessing
import os
import random
import resource
import runpy
import signal
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lastgasp import user_signals
from lastgasp.gasp.again import ORDER
from lastgasp.launch import warm_checks
from lastgasp.launch.orphans import MARK
from lastgasp.launch.warm_folders import renew_folders
from lastgasp.launch.warm_templates import renew_templates


@dataclass(frozen=True, kw_only=True)
class Order:
    """What the launcher wants to be forked.

    Attributes:
        command: of a fresh interpreter: executable, -u, script or -m module, arguments.
        environment: all of it.
        umask, limits: the launcher's own: number, soft and hard for each of `resource`'s.
    """

    command: list[str]
    environment: dict[str, str]
    umask: int
    limits: list[list[int]]

    def encoded(self) -> bytes:
        """For the other side; any environment can be carried, also one that is not UTF-8."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decoded(cls, data: bytes) -> Order:
        """Of what `encoded` has made."""
        return cls(**json.loads(data))


def become(order: Order, descriptors: Sequence[int], imported: Mapping[str, str | None]) -> None:
    """Give this process what the launcher's children have.

    Args:
        descriptors: of stdin, stdout, stderr and the working directory; closed.
        imported: variables that imports have set (None: deleted), as they would have in a fresh interpreter.
    """
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
    os.fchdir(descriptors[3])
    for descriptor in descriptors:
        os.close(descriptor)
    os.umask(order.umask)
    for which, soft, hard in order.limits:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(which, (soft, hard))
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    user_signals.restore()
    _show(order)
    os.environ.clear()
    os.environ.update(order.environment)
    for name, value in imported.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    multiprocessing.current_process().authkey = os.urandom(32)
    renew_ranks(sys.modules)
    renew_seeds(sys.modules)
    renew_templates(sys.modules)
    renew_folders()
    pass_barriers(sys.modules)


def renew_ranks(modules: Mapping[str, Any]) -> None:
    """Lightning and torchmetrics take the rank from the environment when they are imported."""
    for name in ("lightning.fabric.utilities.rank_zero", "lightning_fabric.utilities.rank_zero"):
        if (module := modules.get(name)) is not None:
            module.rank_zero_only.rank = module._get_rank() or 0
    if (module := modules.get("torchmetrics.utilities.prints")) is not None:
        module.rank_zero_only.rank = int(os.environ.get("LOCAL_RANK", 0))


def renew_seeds(modules: Mapping[str, Any]) -> None:
    """As in a fresh interpreter: generators without a seed begin anywhere; `random` sees to its own one at a fork."""
    for generator in warm_checks.UNSEEDED:
        random.Random.seed(generator)
    if (torch := modules.get("torch")) is not None:
        torch.default_generator.seed()
    if (numpys := modules.get("numpy.random")) is not None:
        numpys.seed()


def pass_barriers(modules: Mapping[str, Any]) -> None:
    """A process that takes the place of a rank runs the script of a Trainer alone, until it has taken its order.

    One for a missing rank has no others at all there.
    """
    module = modules.get("lastgasp_transformers.script_alone")
    if module is not None and ORDER in os.environ:
        module.run_script_alone(lambda: ORDER in os.environ)
    if (module := modules.get("lastgasp_transformers.newcomer")) is not None:
        module.stand_alone()


def run(command: Sequence[str]) -> None:
    """Run the program of `command` as `__main__`; returns, or raises SystemExit, where the interpreter is to end."""
    pose(command)
    try:
        if command[2] == "-m":
            _put_first(os.getcwd())
            runpy._run_module_as_main(command[3])  # type: ignore[attr-defined]  # what `python -m` calls
        else:
            _put_first(os.path.dirname(os.path.realpath(command[2])))
            _run_script(vars(sys.modules["__main__"]))
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        _show_error(error)
        raise SystemExit(1) from None


def pose(command: Sequence[str]) -> None:
    """Look like the interpreter of `command` before its first line: what is imported may look, or keep `__main__`."""
    script = command[2] if command[2] != "-m" else ""
    sys.orig_argv, sys.argv = list(command), list(command[2:]) if script else ["-m", *command[4:]]
    names = vars(sys.modules["__main__"])
    names.clear()
    names |= vars(types.ModuleType("__main__")) | {"__builtins__": builtins, "__annotations__": {}}
    if script:
        full = os.path.abspath(script)
        loader = importlib.machinery.SourceFileLoader("__main__", full)
        names |= {"__file__": full, "__cached__": None, "__loader__": loader}


def _run_script(names: dict[str, Any]) -> None:
    with io.open_code(names["__file__"]) as file:
        code = compile(file.read(), names["__file__"], "exec", dont_inherit=True)
    exec(code, names)


def _put_first(folder: str) -> None:
    if not sys.flags.safe_path:
        sys.path.insert(0, folder)


def _show_error(error: BaseException) -> None:
    """The traceback from the program's own first line on."""
    ours, frame = {__file__, runpy.__file__, "<frozen runpy>"}, error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename in ours:
        frame = frame.tb_next
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, frame
    sys.excepthook(type(error), error.with_traceback(frame), frame)


def _show(order: Order) -> None:
    """Let `ps` show the rank's own command line, and those who look for a job's processes find this one.

    Both stand where the kernel has put them at the start of the warm process, which has left room.
    """
    with open("/proc/self/stat") as file:
        begin, end, variables = map(int, [*file.read().rpartition(")")[2].split()[45:48]])
    with open("/proc/self/environ", "rb") as raw:
        environ = b"\0" + raw.read()
    line = b"\0".join(map(os.fsencode, order.command))[: end - begin - 1]
    ctypes.memmove(begin, line.ljust(end - begin, b"\0"), end - begin)
    needle = f"\0{MARK}=".encode()
    old, new = environ.find(needle), os.fsencode(order.environment.get(MARK, ""))
    if old >= 0 and environ.find(b"\0", old + 1) - old - len(needle) == len(new):
        ctypes.memmove(variables + old + len(needle) - 1, new, len(new))
