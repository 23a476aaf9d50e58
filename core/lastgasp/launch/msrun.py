"""`lastgasp run --framework mindspore`: msrun in this process, with its workers watched and restarted by lastgasp.

msrun itself kills the survivors about a second after the first failure. With TaskD enabled it leaves that to
TaskD, which it calls in its own process; here the embedded engine takes that place (docs/facts/taskd.md §8,
docs/facts/mindformers.md §3). A real TaskD is neither needed nor used.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lastgasp import user_signals
from lastgasp.errors import ConfigError, MissingExtra
from lastgasp.launch.framework import STARTERS
from lastgasp.launch.mswatch import Watch
from lastgasp.launch.taskdagent import OPERATIONS, Agent, serving

FRAMEWORK = "mindspore"
OPTION = "--framework"
MSRUN_OPTIONS = (
    "--worker_num",
    "--local_worker_num",
    "--master_addr",
    "--master_port",
    "--node_rank",
    "--log_dir",
    "--join",
    "--cluster_time_out",
    "--bind_core",
    "--bind_numa",
    "--sim_level",
    "--sim_rank_id",
    "--rank_table_file",
    "--worker_log_name",
    "--tail_worker_log",
    "--rank_table",
)
"""msrun's options; each takes a value."""
TFT = "MS_ENABLE_TFT"
RESTARTS = "RSC:1"
"""The only item of MS_ENABLE_TFT that hands the processes over; it needs no MindIO."""
_INTERPRETERS = ("python", "python3")


def msrun_arguments(arguments: Sequence[str]) -> list[str] | None:
    """msrun's command line, if `--framework mindspore` is among its options; None for another launcher's.

    Args:
        arguments: what follows `lastgasp run`.
    """
    rest, index = list(arguments), 0
    while index < len(rest):
        name, equals, value = rest[index].partition("=")
        words = 1 if equals else 2
        if name == OPTION:
            value = value if equals else "".join(rest[index + 1 : index + 2])
            return rest[:index] + rest[index + words :] if value == FRAMEWORK else None
        if name not in MSRUN_OPTIONS:
            return None
        index += words
    return None


def with_join(arguments: list[str]) -> list[str]:
    """Show the workers' logs unless the user chose otherwise."""
    given = any(argument.split("=")[0] == "--join" for argument in arguments)
    return arguments if given else ["--join", "True", *arguments]


def taskds_msrun(arguments: list[str]) -> int:
    """Run a job with the msrun that calls the real TaskD, which watches and restarts its workers.

    Returns:
        msrun's exit code.

    Raises:
        MissingExtra: MindSpore is not installed.
    """
    _find_python()
    if shutil.which("msrun") is None:
        raise MissingExtra(FRAMEWORK, "mindformers")
    environ = os.environ | {"LASTGASP": os.environ.get("LASTGASP") or "1"}
    process = subprocess.Popen(["msrun", *with_join(arguments)], env=environ)
    before = signal.signal(signal.SIGTERM, lambda number, _: process.send_signal(number))
    try:
        return process.wait()
    finally:
        signal.signal(signal.SIGTERM, before)


def started_by_us(script: str, rest: Sequence[str]) -> tuple[str, list[str]]:
    """What msrun starts instead of `script *rest`: the plugin first, then the script.

    `python` in front may be left out, as with msrun itself. pytest is left as it is.
    """
    if script not in _INTERPRETERS:
        return (script, list(rest)) if script == "pytest" else ("python", ["-m", STARTERS[FRAMEWORK], script, *rest])
    words = list(rest)
    if not words or (words[0].startswith("-") and words[0] != "-m"):
        allowed = "a script, or -m and a module, right after it"
        raise ConfigError(script, " ".join(words), allowed, f"Set PYTHON* variables in place of {script}'s options.")
    return script, ["-m", STARTERS[FRAMEWORK], *words]


def tft_with_restarts(value: str) -> str:
    """MS_ENABLE_TFT with the user's items, and restarts handed over."""
    inner = value.strip().removeprefix("{").removesuffix("}").strip().rstrip(",")
    if RESTARTS in inner:
        return value
    return "{" + ",".join(filter(None, [inner, RESTARTS])) + "}"


def launch(arguments: list[str]) -> int:
    """Run one job to its end.

    Args:
        arguments: msrun's command line, less `--framework`.

    Returns:
        The exit code: 0 done, 83, 84 or 85 asked to stop, 86 no progress, 128 and more killed by a signal.

    Raises:
        MissingExtra: MindSpore is not installed.
        ConfigError: options that do not go together, or a version whose msrun has another interface.
    """
    try:
        from mindspore.parallel.cluster.process_entity import _ProcessManager
        from mindspore.parallel.cluster.run import get_args
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or FRAMEWORK, "mindformers") from error
    args = _parsed(get_args, with_join(arguments))
    args.task_script, args.task_script_args = started_by_us(args.task_script, args.task_script_args)
    users = os.environ.get(TFT)
    _prepare_environment(users or "")
    user_signals.outlive()
    agent = Agent()
    with serving(agent):
        manager = _ProcessManager(args)
        _must_be_given(agent)
        _restore(TFT, users)
        watch = Watch(manager, args)
        agent.main = watch.run
        manager.run()
    return watch.code


def _parsed(get_args: Any, arguments: list[str]) -> Any:
    """msrun's own parser reads sys.argv."""
    before, sys.argv = sys.argv, ["lastgasp run --framework mindspore", *arguments]
    try:
        return get_args()
    finally:
        sys.argv = before


def _prepare_environment(users: str) -> None:
    os.environ[TFT] = tft_with_restarts(users)
    os.environ["LASTGASP"] = os.environ.get("LASTGASP") or "1"
    _find_python()


def _find_python() -> None:
    here = Path(sys.executable).parent
    if shutil.which("python") != str(here / "python") and (here / "python").exists():
        # msrun starts the `python` on PATH, which is another one unless the environment is activated.
        os.environ["PATH"] = os.pathsep.join([str(here), os.environ.get("PATH", os.defpath)])


def _restore(name: str, value: str | None) -> None:
    """Let workers see the user's own value: there is no TaskD for them to talk to."""
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _must_be_given(agent: Agent) -> None:
    missing = sorted(set(OPERATIONS) - set(agent.operations))
    if missing:
        from importlib.metadata import version

        found = f"mindspore {version(FRAMEWORK)}, whose msrun does not give {', '.join(missing)}"
        remedy = "Install mindspore 2.7 to 2.9, or start the job with msrun itself."
        raise ConfigError("msrun", found, f"the interface of TaskD's agent: {', '.join(OPERATIONS)}", remedy)
