"""Traps of TaskD, MindIO and the pods of MindCluster."""

from __future__ import annotations

import ipaddress
import math
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec

from lastgasp.backends.ascend.goenv import set_too_late
from lastgasp.backends.ascend.mindio.strategies import wanted_strategies
from lastgasp.errors import ConfigError
from lastgasp.gasp.secret import FILE, REMEDY, TOKEN, Secret

from .checks import Match, check
from .machine import Machine

LOG_MODE = 0o750
SWITCH_FILE = "/user/cluster-info/datatrace-config/profilingSwitch"
PROFILING = "/user/cluster-info/profiling"
RESET_FILE = "/user/restore/reset/config/reset.json"
RANGES = {
    "TTP_RETRY_TIMES": (1, 300, 10),
    "TTP_NORMAL_ACTION_TIME_LIMIT": (30, 1800, 180),
    "MINDIO_WAIT_MINDX_TIME": (1, 3600, 30),
    "TTP_ACCLINK_CHECK_PERIOD_HOURS": (24, 720, 168),
    "TTP_ACCLINK_CERT_CHECK_AHEAD_DAYS": (7, 180, 30),
}
"""Least, most and default of MindIO's numbers (docs/facts/mindio_tft.md §4)."""
_CERTIFICATES = ("TTP_ACCLINK_CERT_CHECK_AHEAD_DAYS", "TTP_ACCLINK_CHECK_PERIOD_HOURS")
"""Days ahead of which a warning is given, and hours between two looks; the first must not be shorter (same section)."""
TASKD_RANGES = {
    "TASKD_PROCESS_INTERVAL": (100, 1000, "takes 100 ms"),
    "TASKD_REPORT_FAULT_TIMEOUT": (300, 600, "waits without end"),
}
"""Least, most and what happens otherwise (docs/facts/taskd.md §2, §5)."""
SWITCHES = ("CommunicationOperator", "Step", "SaveCheckpoint", "FP", "DataLoader")
"""The keys of the switch file (docs/facts/taskd.md §6)."""
_SIZES = ("WORLD_SIZE", "MS_WORKER_NUM")
_NO_WATCHDOG = ("ARF", "TSP", "HCCE")


def _log_directory(machine: Machine) -> Path:
    return machine.at(machine.env.get("TASKD_LOG_PATH") or "taskd_log")


@check("taskd-log-symlink", "error", "taskd.md §1", "TaskD's log directory is a symlink")
def taskd_log_symlink(machine: Machine) -> Iterator[Match]:
    """Importing taskd raises."""
    path = _log_directory(machine)
    if machine.in_mindcluster and path.is_symlink():
        fix = "Set TASKD_LOG_PATH to a real directory before the start."
        yield Match(f"TaskD's log directory {path} is a symlink: importing taskd raises", fix)


@check("taskd-log-mode", "error", "taskd.md §1", "TaskD's log directory has another mode than 0750")
def taskd_log_mode(machine: Machine) -> Iterator[Match]:
    """Exactly that, nothing stricter either."""
    path = _log_directory(machine)
    if machine.in_mindcluster and path.is_dir() and not path.is_symlink():
        found = path.stat()
        mode = stat.S_IMODE(found.st_mode)
        if mode != LOG_MODE:
            what = f"TaskD's log directory {path} has mode {mode:04o}: importing taskd raises"
            if machine.uid in (0, found.st_uid):
                yield Match(what, f"chmod 0750 {path} (lastgasp does it automatically)", "warning")
            else:
                yield Match(
                    what, f"Have its owner chmod 0750 {path}, or set TASKD_LOG_PATH to a directory of this user."
                )


@check("umask", "warning", "taskd.md §1", "A umask that makes TaskD's log directory too strict")
def umask(machine: Machine) -> Iterator[Match]:
    """The package makes it, and then refuses it."""
    if machine.in_mindcluster and LOG_MODE & ~machine.umask != LOG_MODE and not _log_directory(machine).exists():
        what = f"with umask {machine.umask:03o} TaskD makes its log directory {LOG_MODE & ~machine.umask:04o}, not 0750"
        fix = f"umask 027, or mkdir -m 0750 {_log_directory(machine)} (lastgasp does it automatically)"
        yield Match(what + ", and refuses it", fix)


@check("switch-symlink", "warning", "taskd.md §6", "The switch file is reached through a symlink")
def switch_symlink(machine: Machine) -> Iterator[Match]:
    """A mounted ConfigMap consists of them."""
    path = machine.at(SWITCH_FILE)
    links = [str(one) for one in (path, *list(path.parents)[:3]) if one != machine.root and one.is_symlink()]
    if links:
        fix = "Mount the host's directory instead of the ConfigMap (docs/ascend-job-yaml.md)."
        yield Match(f"{links[0]} is a symlink: TaskD refuses the switch file (lastgasp reads it)", fix)


@check("env-too-late", "error", "taskd.md §1", "A variable was set after the start: TaskD's Go half does not see it")
def env_too_late(machine: Machine) -> Iterator[Match]:
    """Go reads the block of exec time."""
    if machine.exec_env is None or machine.taskd is None:
        return
    for name, (go, python) in set_too_late(machine.exec_env, machine.env).items():
        what = f"{name} is {python!r} in os.environ and {go!r} to TaskD's Go half, which reads the start's environment"
        yield Match(what, f"Export {name} before Python starts.")


@check("watchdog-torch", "error", "job_yaml.md §4", "torch_npu's watchdog is on while processes are to be recovered")
def watchdog_torch(machine: Machine) -> Iterator[Match]:
    """It ends the ranks that MindIO or TaskD would keep; with lastgasp's own engine such a rank is one that raised."""
    if machine.wanted == "embedded" or not (machine.mindio or machine.taskd is not None):
        return
    value = machine.env.get("HCCL_ASYNC_ERROR_HANDLING")
    if machine.recovers and "MS_ENABLE_TFT" not in machine.env and value != "0":
        what = f"HCCL_ASYNC_ERROR_HANDLING is {value or 'unset'}: the watchdog ends ranks that are to be recovered"
        yield Match(what, "export HCCL_ASYNC_ERROR_HANDLING=0 (the operator and lastgasp run do).")


@check(
    "watchdog-mindspore", "error", "taskd.md §5, mindformers.md §3", "MindSpore's watchdog is on with ARF, TSP, HCCE"
)
def watchdog_mindspore(machine: Machine) -> Iterator[Match]:
    """MS_ENABLE_THM turns it off."""
    items = [f"{one}:1" for one in _NO_WATCHDOG if one in machine.tft]
    if items and "HCCL_WATCHDOG:0" not in machine.env.get("MS_ENABLE_THM", ""):
        what = f"MS_ENABLE_TFT has {', '.join(items)}, MS_ENABLE_THM is {machine.env.get('MS_ENABLE_THM') or 'unset'}"
        yield Match(what + ": the watchdog ends ranks", 'export MS_ENABLE_THM="{HCCL_WATCHDOG:0}"')


@check("controller-env", "error", "taskd.md §2", "MindIO's controller lacks its address, port or size")
def controller_env(machine: Machine) -> Iterator[Match]:
    """A ValueError in one thread of TaskD's, and nobody recovers."""
    if not (machine.in_mindcluster and machine.recovers):
        return
    if not any(machine.env.get(name) for name in _SIZES):
        fix = "MindCluster's operator sets it in each pod; export it elsewhere."
        yield Match(f"neither {' nor '.join(_SIZES)} is set: TaskD cannot start MindIO's controller", fix)
    if not machine.env.get("POD_IP"):
        fix = "Add it to the job YAML (lastgasp job patch does), or export it."
        yield Match("POD_IP is not set: TaskD cannot start MindIO's controller", fix)
    port = machine.env.get("TTP_PORT")
    if ttp_port(machine) is None:
        what = f"TTP_PORT is {port or 'unset'}, not a port from 1024 to 65535: TaskD cannot start MindIO's controller"
        yield Match(what, 'Add it to the job YAML, as in "8000" (lastgasp job patch does).')


def ttp_port(machine: Machine) -> int | None:
    """TTP_PORT where MindIO takes it."""
    text = machine.env.get("TTP_PORT", "")
    number = int(text) if text.isascii() and text.isdecimal() and len(text) < 6 else 0
    return number if 1024 <= number <= 65535 else None


@check(
    "recover-secret", "warning", "mindio_tft.md §7", "recover or elastic-training, and a new process could not join"
)
def recover_secret(machine: Machine) -> Iterator[Match]:
    """The strategy is then refused at start; the step is saved, and the job restarts."""
    asked = sorted({"recover", "elastic-training"} & wanted_strategies(machine.env), reverse=True)
    if not (machine.led_by_mindio and asked) or "MS_ENABLE_TFT" in machine.env:
        return
    is_refused = "is refused" if len(asked) == 1 else "are refused"
    refused = f"{' and '.join(asked)} {is_refused}: the step is saved and the job restarts"
    given = machine.env.get("LASTGASP_RECOVERY") or "auto"
    if given != "auto":
        yield Match(f"LASTGASP_RECOVERY={given}: {refused}", "Write auto, or unset it.")
    try:
        if Secret.from_environment(machine.env).missing:
            yield Match(f"{FILE} and {TOKEN} are unset: {refused}, where there are several nodes", REMEDY)
    except ConfigError as error:
        yield Match(f"{refused}: {error}", REMEDY)


@check("taskd-process-off", "error", "job_yaml.md §4", "TASKD_PROCESS_ENABLE=off while processes are to be recovered")
def taskd_process_off(machine: Machine) -> Iterator[Match]:
    """No controller is started then."""
    if machine.recovers and machine.env.get("TASKD_PROCESS_ENABLE") == "off":
        what = "TASKD_PROCESS_ENABLE=off starts no MindIO controller, so nothing is recovered"
        yield Match(what, "export TASKD_PROCESS_ENABLE=on")


@check("master-addr", "error", "taskd.md §1", "MASTER_ADDR is a name where TaskD wants an address")
def master_addr(machine: Machine) -> Iterator[Match]:
    """Its proxy refuses host names."""
    for name in ("MASTER_ADDR", "MS_SCHED_HOST"):
        value = machine.env.get(name)
        if not machine.taskd_job or not value:
            continue
        try:
            ipaddress.ip_address(value)
        except ValueError:
            what = f"{name}={value} is a name: TaskD's proxy takes IP addresses only"
            yield Match(what, f"export {name}=<the address of node 0, its POD_IP>")


@check("reset-json", "warning", "taskd.md §2", "reset.json is not mounted")
def reset_json(machine: Machine) -> Iterator[Match]:
    """TaskD's manager logs an error every 100 ms."""
    if machine.in_mindcluster and not machine.at(RESET_FILE).exists():
        what = f"{RESET_FILE} is not there: TaskD's manager logs an error every 100 ms, and GracefulExit is not seen"
        yield Match(what, "Mount it (lastgasp job patch does).")


@check("profiling-dir", "warning", "taskd.md §6", "MindCluster's profiling directory cannot be written")
def profiling_dir(machine: Machine) -> Iterator[Match]:
    """Marks go beside the checkpoints then."""
    path = machine.at(PROFILING)
    if path.is_dir() and not os.access(path, os.W_OK | os.X_OK):
        what = f"{PROFILING} cannot be written by this user"
        yield Match(
            what, "Make it writable, or set LASTGASP_PROFILING_DIR; until then marks go beside the checkpoints."
        )


@check("mindio-ranges", "warning", "mindio_tft.md §4", "A number that MindIO silently replaces by its default")
def mindio_ranges(machine: Machine) -> Iterator[Match]:
    """Out of range is ignored silently."""
    for name, (least, most, default) in RANGES.items():
        text = machine.env.get(name)
        if text is not None and not _within(text, least, most):
            yield Match(f"{name}={text} is ignored, MindIO takes {default}", f"Write {least} to {most}.")
    days, hours = (_taken(machine, name) for name in _CERTIFICATES)
    if days * 24 < hours:
        what = f"certificates are looked at every {hours} h and warned of {days} days ahead: too late"
        yield Match(what, f"Write at least {math.ceil(hours / 24)} for {_CERTIFICATES[0]}, or unset both.")


def _taken(machine: Machine, name: str) -> int:
    """The number that MindIO takes."""
    text, (least, most, default) = machine.env.get(name, ""), RANGES[name]
    return int(text) if _within(text, least, most) else default


def _within(text: str, least: int, most: int) -> bool:
    return bool(re.fullmatch(r"[0-9]{1,6}", text)) and least <= int(text) <= most


@check("taskd-ranges", "warning", "taskd.md §2, §5", "A number that TaskD silently replaces by its default")
def taskd_ranges(machine: Machine) -> Iterator[Match]:
    """Out of range is ignored silently."""
    for name, (least, most, instead) in TASKD_RANGES.items():
        text = machine.env.get(name)
        if text is not None and not _within(text, least, most):
            yield Match(f"{name}={text} is ignored, TaskD {instead}", f"Write {least} to {most}, or unset it.")


@check("switch-content", "warning", "taskd.md §6", "A switch file that does not say what it means to")
def switch_content(machine: Machine) -> Iterator[Match]:
    """Unknown keys and values are passed over; what cannot be read changes nothing."""
    path = machine.at(SWITCH_FILE)
    if not path.is_file():
        return
    fix = f'Write {_quoted_keys()}, each "on" or "off" (lastgasp job switch-configmap prints one).'
    try:
        said = msgspec.json.decode(path.read_bytes()[: 1 << 20], type=dict[str, object])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        yield Match(f"{SWITCH_FILE} is not a JSON object: it changes nothing", fix)
        return
    odd = [f"{key}={value!r}" for key, value in said.items() if key not in SWITCHES or value not in ("on", "off")]
    if odd:
        yield Match(f"{SWITCH_FILE} has {', '.join(odd[:5])}: TaskD does not take it", fix)


def _quoted_keys() -> str:
    return ", ".join(f'"{key}"' for key in SWITCHES)


@check("ttp-log-symlink", "warning", "mindio_tft.md §4", "MindIO's log directory is a symlink")
def ttp_log_symlink(machine: Machine) -> Iterator[Match]:
    """It takes none."""
    given = machine.env.get("TTP_LOG_PATH")
    if machine.mindio and given and machine.at(given).is_symlink():
        yield Match(f"TTP_LOG_PATH={given} is a symlink, which MindIO does not take", "Name a real directory.")


@check("dp-replicas", "error", "mindio_tft.md §8, §16", "The data-parallel size is not divisible by the replicas")
def dp_replicas(machine: Machine) -> Iterator[Match]:
    """Positions p and p + size/replicas hold the same shard."""
    size, replicas = machine.job.dp_size, machine.job.replicas
    if size is not None and replicas is not None and (replicas < 1 or size % replicas):
        what = f"{replicas} replicas of each shard do not divide a data-parallel group of {size}: no dump is possible"
        yield Match(what, "Choose sizes that divide.")


@check("save-limit", "error", "mindio_tft.md §12, §15", "MindIO gives a save less time than it takes")
def save_limit(machine: Machine) -> Iterator[Match]:
    """A save that is over the limit is completed and never renamed."""
    seconds = machine.job.save_s
    said = "as you say"
    if seconds is None and machine.storage is not None:
        seconds, said = machine.storage.save_s, "as the incident records say"
    text = machine.env.get("TTP_NORMAL_ACTION_TIME_LIMIT", "")
    limit, most = _taken(machine, "TTP_NORMAL_ACTION_TIME_LIMIT"), RANGES["TTP_NORMAL_ACTION_TIME_LIMIT"][1]
    needed = 0 if seconds is None else int(seconds * 1.5) + 25
    if seconds is not None and needed > limit and machine.led_by_mindio:
        what = f"a save takes {seconds:g} s ({said}); MindIO's limit for stop, clean and save together is {limit} s"
        fix = f"export TTP_NORMAL_ACTION_TIME_LIMIT={min(needed, most)}"
        if needed > most:
            yield Match(what, f"{fix}, its most, and save faster: more writers, or a faster disk.")
        elif text:
            yield Match(what, fix)
        else:
            what += " by default; lastgasp raises it to the state's size, for writing at 200 MB/s"
            yield Match(what, f"{fix}, where it is written more slowly.", "warning")
