"""Each trap of `lastgasp doctor`: seen on a machine that has it, and not on a good one."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from lastgasp.backends import MINDIO_BESIDE
from lastgasp.doctor.checks import Diagnosis, every_check, examine
from lastgasp.doctor.machine import JobFacts, Machine, Storage, under_run
from lastgasp.errors import ConfigError
from lastgasp.launch.ascend import Machine as Found

LISTEN = "  sl  local_address rem_address   st\n   0: 00000000:{port:04X} 00000000:0000 0A 00000000\n"
SWITCH = "/user/cluster-info/datatrace-config/profilingSwitch"
PEM = "-----BEGIN ENCRYPTED PRIVATE KEY-----"
TLS = "tlsCert: /tls/cert.pem; tlsCaPath: /tls; tlsCaFile: ca.pem; tlsPk: {pem}; tlsPkPwd: x; packagePath: /tls/lib"


@dataclass
class Box:
    """A machine to break: its files lie below a temporary directory."""

    root: Path
    machine: Machine

    def file(self, path: str, text: str = "", mode: int = 0o644) -> Path:
        target = self.root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        target.chmod(mode)
        return target

    def directory(self, path: str, mode: int = 0o755) -> Path:
        target = self.root / path.lstrip("/")
        target.mkdir(parents=True, exist_ok=True)
        target.chmod(mode)
        return target

    def set(self, **changes: Any) -> None:
        self.machine = replace(self.machine, **changes)

    def env(self, **more: str) -> None:
        self.set(env={**self.machine.env, **more})

    def installed(self, **versions: str) -> None:
        """Distributions, with packages of the same names; both with _ for -."""
        names = {name.replace("_", "-"): version for name, version in versions.items()}
        places = {name: self.root / "site" / name for name in versions}
        self.set(versions={**self.machine.versions, **names}, places={**self.machine.places, **places})

    def taskd(self) -> None:
        """MindCluster's, with all that it wants."""
        for folder in ("python/cython_api", "api"):
            self.directory(f"site/taskd/{folder}")
        self.set(places={**self.machine.places, "taskd": self.root / "site/taskd"})
        self.file("lib/libmspti.so")
        self.file("lib/libtaskd.so")
        self.set(found=Found("/lib/libmspti.so", "/lib/libtaskd.so"))
        self.directory("work/taskd_log", 0o750)
        self.file("/user/restore/reset/config/reset.json", "{}")
        self.env(LD_PRELOAD="/lib/libmspti.so:/lib/libtaskd.so", MINDX_TASK_ID="job-1")
        self.set(exec_env=dict(self.machine.env))

    def recovering(self) -> None:
        """A pod of a job with process-level recovery."""
        self.taskd()
        self.env(PROCESS_RECOVER="on", HIGH_AVAILABILITY="dump", HCCL_ASYNC_ERROR_HANDLING="0", POD_IP="10.0.0.1",
                 TTP_PORT="8000", MASTER_ADDR="10.0.0.1", WORLD_SIZE="16")  # fmt: skip
        self.set(exec_env=dict(self.machine.env))

    def replacing(self) -> None:
        """MindIO leads a job in which TaskD starts single processes anew."""
        self.set(places={**self.machine.places, "mindio_ttp": self.root / "site/mindio_ttp"})
        self.env(HIGH_AVAILABILITY="dump,recover", LASTGASP_BACKEND="ascend", LASTGASP_TOKEN="7" * 32)

    def drop_in(self) -> None:
        """lastgasp-mindio's package."""
        self.file("site/mindio_ttp/served-by-lastgasp")
        self.set(places={**self.machine.places, "mindio_ttp": self.root / "site/mindio_ttp"})

    def tls(self) -> None:
        """MindIO with TLS, as it should be."""
        self.file("/tls/cert.pem")
        self.file("/tls/ca.pem")
        for name in ("libssl.so", "libcrypto.so"):
            self.file(f"/tls/lib/{name}", mode=0o440)
        self.set(job=JobFacts(tls_info=TLS.format(pem=PEM)))

    def found(self) -> dict[str, Diagnosis]:
        return {one.check: one for one in examine(self.machine)}


@pytest.fixture
def box(tmp_path: Path) -> Box:
    (tmp_path / "work").mkdir()
    good = Storage(kind="ext4", options=("rw",), free=10 << 30, largest=1 << 30, clock_offset_s=0.0, save_s=10.0)
    machine = Machine(root=tmp_path, cwd=tmp_path / "work", directory="ckpts", storage=good,
                      versions={"torch": "2.13.0"}, places={"torch": tmp_path})  # fmt: skip
    return Box(tmp_path, machine)


def storage(box: Box, **changes: Any) -> None:
    assert box.machine.storage is not None
    box.set(storage=replace(box.machine.storage, **changes))


def listening(box: Box, port: int, table: str = "tcp") -> None:
    box.file(f"/proc/net/{table}", LISTEN.format(port=port))


def installed(**versions: str) -> Callable[[Box], None]:
    return lambda box: box.installed(**versions)


INFO = "/usr/local/Ascend/cann/aarch64-linux/ascend_toolkit_install.info"


def env(**more: str) -> Callable[[Box], None]:
    return lambda box: box.env(**more)


def then(*steps: Callable[[Box], Any]) -> Callable[[Box], None]:
    def both(box: Box) -> None:
        for step in steps:
            step(box)

    return both


def link_log(box: Box) -> None:
    (box.root / "work/taskd_log").rename(box.root / "work/elsewhere")
    (box.root / "work/taskd_log").symlink_to("elsewhere")


def another_users_log(box: Box) -> None:
    box.directory("work/taskd_log", 0o700)
    box.set(uid=os.getuid() + 1)


def link_switch(box: Box) -> None:
    box.file("/user/cluster-info/datatrace-config/..data/profilingSwitch", "{}")
    (box.root / "user/cluster-info/datatrace-config/profilingSwitch").symlink_to("..data/profilingSwitch")


def link_ttp_log(box: Box) -> None:
    box.directory("/var/real")
    (box.root / "var/ttp").symlink_to("real")
    box.env(TTP_LOG_PATH="/var/ttp")
    box.installed(torch_npu="2.13.0", mindio_ttp="7.3.0")
    box.env(TORCH_DEVICE_BACKEND_AUTOLOAD="0")


def link_library(box: Box) -> None:
    (box.root / "tls/lib/libssl.so").unlink()
    (box.root / "tls/lib/libssl.so").symlink_to("libcrypto.so")


def tls_without(old: str, new: str) -> Callable[[Box], None]:
    return lambda box: box.set(job=JobFacts(tls_info=TLS.format(pem=PEM).replace(old, new)))


LED = then(Box.recovering, Box.replacing)
GOOD, TASKD, RECOVERING, TLS_BOX = (lambda box: None), Box.taskd, Box.recovering, Box.tls
MS = installed(mindspore="2.9.0", mindformers="1.9.0", numpy="1.26.4", pyarrow="20.0")
NPU = then(installed(torch_npu="2.13.0"), env(TORCH_DEVICE_BACKEND_AUTOLOAD="0"))
MINDIO = then(NPU, installed(mindio_ttp="7.3.0"), env(LASTGASP_BACKEND="ascend"))
TFT = then(env(MS_ENABLE_TFT="{TTP:1}", MINDIO_FOR_MINDSPORE="1", MS_TFT_IP="10.0.0.1", MS_TFT_PORT="8000"), MS,
           installed(mindio_ttp="7.3.0"), lambda box: box.file("/dev/davinci0"))  # fmt: skip
Step = Callable[[Box], Any]

CASES: list[tuple[str, Step, Step]] = [
    ("mindformers-mindspore", MS, installed(mindspore="2.7.0")),
    ("mindformers-mindspore", MS, installed(mindformers="1.6.0")),
    ("mindformers-mindspore", installed(mindspore="2.7.1", mindformers="1.7.0"), installed(mindspore="2.7.2")),
    ("mindformers-mindspore", MS, lambda box: box.set(versions={"mindformers": "1.9.0"})),
    ("hyper-parallel", MS, installed(mindformers="2.0.0", mindspore="2.10.0")),
    ("mindspore-numpy", MS, installed(numpy="2.1.0")),
    ("mindspore-pyarrow", MS, installed(pyarrow="26.0")),
    ("torch-npu-torch", NPU, installed(torch="2.12.1")),
    ("torch-npu-cann", NPU, env(TORCH_DEVICE_BACKEND_AUTOLOAD="1")),
    ("torch-npu-cuda", NPU, installed(torch="2.13.0+cu130")),
    ("torch-npu-cuda", NPU, installed(nvidia_cuda_runtime_cu12="12.8")),
    ("lightning-series", installed(lightning="2.6.6"), installed(lightning="2.4.0")),
    ("lightning-series", installed(pytorch_lightning="2.5.1"), installed(pytorch_lightning="2.7.0")),
    ("megatron-series", installed(megatron_core="0.19.2"), installed(megatron_core="0.20.0")),
    ("backend", GOOD, env(LASTGASP_BACKEND="ascend")),
    ("backend", GOOD, env(LASTGASP_BACKEND="npu")),
    ("no-framework", GOOD, lambda box: box.set(versions={"numpy": "2.0"}, places={"megatron": box.root})),
    ("ring-extension", GOOD, lambda box: box.set(ring="missing")),
    ("ring-extension", GOOD, lambda box: box.set(ring="switched off")),
    ("ring-extension", GOOD, lambda box: box.set(ring="other version")),
    ("taskd-library", TASKD, lambda box: box.set(found=Found())),
    ("slow-load", GOOD, env(THP_MEM_ALLOC_ENABLE="1")),
    ("taskd-unrelated", TASKD, lambda box: (box.root / "site/taskd/api").rmdir()),
    ("taskd-torch", then(TASKD, installed(torch="2.12.0")), installed(torch="2.13.0")),
    ("mindio-twice", Box.drop_in,
     lambda box: box.set(places={**box.machine.places, MINDIO_BESIDE: box.root / "other/mindio_ttp"})),
    ("mindio-framework", MINDIO, lambda box: box.set(places={"mindio_ttp": box.root})),
    ("mindio-framework", MINDIO, env(MINDIO_FOR_MINDSPORE="1")),
    ("tft-spelling", env(MS_ENABLE_TFT="{RSC:1,UCE:0,TRE:2}"), env(MS_ENABLE_TFT="{TTP: 1}")),
    ("tft-spelling", GOOD, env(MS_ENABLE_TFT='{"TTP":1}')),
    ("tft-env", TFT, env(MS_TFT_IP="")),
    ("tft-env", TFT, lambda box: box.set(places={"mindspore": box.root})),
    ("tft-without-npu", then(env(MS_ENABLE_TFT="{TTP:1}"), lambda box: box.file("/dev/davinci0")),
     lambda box: (box.root / "dev/davinci0").unlink()),
    ("ms-graceful-exit", GOOD, env(MS_ENABLE_GRACEFUL_EXIT="1")),
    ("preload-absent", TASKD, lambda box: (box.root / "lib/libmspti.so").unlink()),
    ("preload-missing", TASKD, env(LD_PRELOAD="/lib/libtaskd.so")),
    ("preload-missing", TASKD, lambda box: (box.root / "lib/libmspti.so").unlink()),
    ("marks-versions", then(TASKD, lambda box: box.file(INFO, "package_name=x\nversion=8.2.RC1\n")),
     lambda box: box.file(INFO, "package_name=x\nversion=8.0.RC3\n")),
    ("marks-versions", TASKD, lambda box: box.installed(mindspore="2.6.0")),
    ("taskd-log-symlink", TASKD, link_log),
    ("taskd-log-mode", TASKD, another_users_log),
    ("umask", then(TASKD, lambda box: box.set(umask=0o027)), then(lambda box: (box.root / "work/taskd_log").rmdir(),
     lambda box: box.set(umask=0o077))),
    ("switch-symlink", lambda box: box.file("/user/cluster-info/datatrace-config/other"), link_switch),
    ("env-too-late", TASKD, env(POD_IP="10.0.0.9")),
    ("watchdog-torch", RECOVERING, env(HCCL_ASYNC_ERROR_HANDLING="1")),
    ("watchdog-torch", RECOVERING, lambda box: box.set(env={k: v for k, v in box.machine.env.items() if k[0] != "H"})),
    ("watchdog-mindspore", env(MS_ENABLE_TFT="{ARF:1}", MS_ENABLE_THM="{HCCL_WATCHDOG:0}"),
     env(MS_ENABLE_THM="{HCCL_WATCHDOG:1}")),
    ("recover-secret", LED, env(LASTGASP_TOKEN="")),
    ("recover-secret", LED, env(LASTGASP_TOKEN="hunter2")),
    ("recover-secret", LED, env(LASTGASP_RECOVERY="save")),
    ("recover-secret", LED, env(LASTGASP_TOKEN="", HIGH_AVAILABILITY="dump,elastic-training")),
    ("controller-env", RECOVERING, env(POD_IP="")),
    ("controller-env", RECOVERING, env(TTP_PORT="80")),
    ("controller-env", RECOVERING, env(WORLD_SIZE="")),
    ("controller-env", then(TASKD, env(MS_WORKER_NUM="8")), env(MS_ENABLE_TFT="{TTP:1}")),
    ("taskd-ranges", env(TASKD_PROCESS_INTERVAL="1000"), env(TASKD_PROCESS_INTERVAL="99")),
    ("taskd-ranges", GOOD, env(TASKD_REPORT_FAULT_TIMEOUT="60")),
    ("switch-content", lambda box: box.file(SWITCH, '{"CommunicationOperator":"on","FP":"off"}'),
     lambda box: box.file(SWITCH, '{"Communication":"on"}')),
    ("switch-content", GOOD, lambda box: box.file(SWITCH, '{"Step":true}')),
    ("switch-content", GOOD, lambda box: box.file(SWITCH, "on")),
    ("taskd-process-off", RECOVERING, env(TASKD_PROCESS_ENABLE="off")),
    ("master-addr", RECOVERING, env(MASTER_ADDR="llama-master-0")),
    ("reset-json", TASKD, lambda box: (box.root / "user/restore/reset/config/reset.json").unlink()),
    ("mindio-ranges", env(TTP_RETRY_TIMES="10"), env(TTP_RETRY_TIMES="301")),
    ("mindio-ranges", GOOD, env(MINDIO_WAIT_MINDX_TIME="1m")),
    ("mindio-ranges", env(TTP_ACCLINK_CERT_CHECK_AHEAD_DAYS="7"), env(TTP_ACCLINK_CHECK_PERIOD_HOURS="192")),
    ("ttp-log-symlink", MINDIO, link_ttp_log),
    ("dp-replicas", lambda box: box.set(job=JobFacts(dp_size=8, replicas=2)),
     lambda box: box.set(job=JobFacts(dp_size=9, replicas=2))),
    ("save-limit", then(MINDIO, env(TTP_NORMAL_ACTION_TIME_LIMIT="700"), lambda box: storage(box, save_s=400.0)),
     lambda box: box.set(job=JobFacts(save_s=1800))),
    ("save-limit", MINDIO, then(env(TTP_NORMAL_ACTION_TIME_LIMIT="9999"), lambda box: storage(box, save_s=200.0))),
    ("tls-items", TLS_BOX, tls_without("tlsPkPwd", "tlsPassword")),
    ("tls-items", TLS_BOX, tls_without("tlsPkPwd: x", "tlsPkPwd: x; note: " + "x" * 10_240)),
    ("tls-key", TLS_BOX, tls_without(PEM, "/tls/key.pem")),
    ("tls-key", TLS_BOX, tls_without(PEM, "-----BEGIN RSA PRIVATE KEY-----")),
    ("tls-files", TLS_BOX, lambda box: (box.root / "tls/ca.pem").unlink()),
    ("tls-libraries", TLS_BOX, link_library),
    ("tls-libraries", TLS_BOX, lambda box: (box.root / "tls/lib/libssl.so").chmod(0o755)),
    ("tls-libraries", TLS_BOX, lambda box: (box.root / "tls/lib/libssl.so").unlink()),
    ("taskd-ports", TASKD, lambda box: listening(box, 9601)),
    ("taskd-ports", TASKD, lambda box: listening(box, 9602, "tcp6")),
    ("ttp-port", RECOVERING, lambda box: listening(box, 8000)),
    ("master-port", GOOD, lambda box: listening(box, 29500)),
    ("master-port", lambda box: listening(box, 6000), env(MASTER_PORT="6000")),
    ("ports-ephemeral", TASKD, lambda box: box.file("/proc/sys/net/ipv4/ip_local_port_range", "1024\t60999\n")),
    ("ports-ephemeral", then(TASKD, lambda box: box.file("/proc/sys/net/ipv4/ip_local_port_range", "1024 60999"),
     lambda box: box.file("/proc/sys/net/ipv4/ip_local_reserved_ports", "9600-9602,29500\n")), env(TTP_PORT="8000")),
    ("clock-skew", GOOD, lambda box: storage(box, clock_offset_s=-3.5)),
    ("clock-free", lambda box: box.set(clock_in_step=True), lambda box: box.set(clock_in_step=False)),
    ("dir-unwritable", GOOD, lambda box: box.set(storage=Storage(error="Permission denied"))),
    ("dir-unwritable", GOOD, lambda box: box.set(storage=Storage(error=os.strerror(errno.ENOSPC)))),
    ("dir-silent", GOOD, lambda box: box.set(storage=Storage(silent_s=60.0))),
    ("dir-no-fsync", GOOD, lambda box: storage(box, fsync_error="Invalid argument")),
    ("dir-volatile", GOOD, lambda box: storage(box, kind="overlay")),
    ("dir-no-barrier", GOOD, lambda box: storage(box, options=("rw", "nobarrier"))),
    ("dir-space", GOOD, lambda box: storage(box, free=1 << 20)),
    ("settings", GOOD, lambda box: box.set(refused=[ConfigError("LASTGASP_KEEP", "0", "an integer", "Use 1.")])),
    ("unknown-variable", env(LASTGASP_KEEP="4"), env(LASTGASP_KEEEP="4")),
    ("unknown-variable", GOOD, env(LASTGASP_SOMETHING_ELSE="4")),
    ("shm-missing", GOOD, lambda box: box.set(shm=None)),
    ("shm-small", GOOD, lambda box: box.set(shm=64 << 20)),
]  # fmt: skip


FIXES: dict[str, tuple[str, ...]] = {
    "backend": ("Install what is missing", "Leave it out"),
    "clock-free": ("chrony",),
    "clock-skew": ("chrony",),
    "controller-env": ("lastgasp job patch", "operator sets it"),
    "dir-no-barrier": ("without",),
    "dir-no-fsync": ("with fsync",),
    "dir-silent": ("file server",),
    "dir-space": ("LASTGASP_KEEP",),
    "dir-unwritable": ("right to write", "Make room"),
    "dir-volatile": ("Mount a volume",),
    "dp-replicas": ("sizes that divide",),
    "env-too-late": ("Export POD_IP before",),
    "hyper-parallel": ("PYTHONPATH",),
    "lightning-series": ("'lightning>=2.5,<2.7'", "'pytorch-lightning>=2.5,<2.7'"),
    "marks-versions": ("Install CANN 8.2.RC1", "do not preload"),
    "master-addr": ("export MASTER_ADDR=",),
    "master-port": ("another MASTER_PORT",),
    "megatron-series": ("0.19.2",),
    "mindformers-mindspore": ("pip install 'mindspore==2.9.*'", "'mindspore==2.7.*'", "'mindspore==2.7.1'", "PyPI"),
    "mindio-framework": ("Install torch_npu", "Install mindspore"),
    "mindio-ranges": ("Write 1 to 300", "Write 1 to 3600", "Write at least 8 for"),
    "mindio-twice": ("pip uninstall lastgasp-mindio",),
    "mindspore-numpy": ("'numpy<2'",),
    "mindspore-pyarrow": ("'pyarrow>=19,<24'",),
    "ms-graceful-exit": ("Unset it",),
    "no-framework": ("the job's own Python",),
    "ports-ephemeral": ("ip_local_reserved_ports=9601,9602", "ip_local_reserved_ports=8000"),
    "preload-absent": ("Correct the path",),
    "preload-missing": ("export LD_PRELOAD",),
    "recover-secret": ("openssl rand -hex 32", "auto"),
    "reset-json": ("lastgasp job patch",),
    "ring-extension": ("C compiler", "Unset it"),
    "save-limit": ("TTP_NORMAL_ACTION_TIME_LIMIT=",),
    "settings": ("Use 1.",),
    "shm-missing": ("Mount a tmpfs",),
    "shm-small": ("--shm-size",),
    "slow-load": ("Unset it",),
    "switch-content": ('"CommunicationOperator"',),
    "switch-symlink": ("the host's directory",),
    "taskd-library": ("Reinstall",),
    "taskd-log-mode": ("chmod 0750",),
    "taskd-log-symlink": ("TASKD_LOG_PATH",),
    "taskd-ports": ("one job with hostNetwork",),
    "taskd-process-off": ("TASKD_PROCESS_ENABLE=on",),
    "taskd-ranges": ("100 to 1000", "300 to 600"),
    "taskd-torch": ("lastgasp run",),
    "taskd-unrelated": ("pip uninstall taskd",),
    "tft-env": ("MS_TFT_IP=", "wheel"),
    "tft-spelling": ("Write {TTP:1}.",),
    "tft-without-npu": ("Unset it",),
    "tls-files": ("permissions",),
    "tls-items": ("Add them", "Shorten"),
    "tls-key": ("content", "openssl pkcs8"),
    "tls-libraries": ("cp --dereference", "chmod 0550", "Copy OpenSSL"),
    "torch-npu-cann": ("TORCH_DEVICE_BACKEND_AUTOLOAD=0",),
    "torch-npu-cuda": ("CPU build",),
    "torch-npu-torch": ("'torch==2.13.*'",),
    "ttp-log-symlink": ("real directory",),
    "ttp-port": ("choose another",),
    "umask": ("umask 027",),
    "unknown-variable": ("Correct or unset it",),
    "watchdog-mindspore": ("HCCL_WATCHDOG:0",),
    "watchdog-torch": ("HCCL_ASYNC_ERROR_HANDLING=0",),
}
"""What the fix of each says, one of them."""


@pytest.mark.parametrize(("check", "before", "breaking"), CASES, ids=[case[0] for case in CASES])
def test_a_trap_is_seen_where_it_is(box: Box, check: str, before: Step, breaking: Step) -> None:
    before(box)
    assert check not in box.found()
    breaking(box)
    found = box.found()[check]
    by_run = check not in {one.check for one in examine(under_run(box.machine)) if one.severity == "error"}
    assert found.severity == ("warning" if by_run else every_check()[check].severity)
    assert found.source == every_check()[check].source and len(found.what) > 20
    assert any(word in found.fix for word in FIXES[check]), found.fix


def test_a_profiling_directory_that_cannot_be_written(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    box.directory("/user/cluster-info/profiling")
    assert "profiling-dir" not in box.found()
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write everywhere
    assert "profiling-dir" in box.found()


def test_every_trap_has_a_case() -> None:
    assert {case[0] for case in CASES} | {"profiling-dir"} == set(every_check())


EMBEDDED = then(RECOVERING, installed(torch="2.13.0", mindio_ttp="7.3.0", torch_npu="2.13.0"),
                env(LASTGASP_BACKEND="embedded", TORCH_DEVICE_BACKEND_AUTOLOAD="0", LD_PRELOAD="/usr/$LIB/libjem.so",
                    MASTER_ADDR="localhost"), lambda box: box.set(umask=0o077, found=Found()),
                lambda box: storage(box, save_s=300.0))  # fmt: skip
"""What MindCluster's packages want does not matter to a job that does without them."""
TASK_RUNNER = then(installed(taskd="1.2.0"), env(LD_PRELOAD="libfast.so"))


@pytest.mark.parametrize(
    "make", [GOOD, MS, TFT, TLS_BOX, then(RECOVERING, installed(torch="2.12.0")), EMBEDDED, TASK_RUNNER]
)
def test_good_machines_have_no_findings(box: Box, make: Step) -> None:
    make(box)
    assert box.found() == {}


def test_errors_come_first_and_every_source_is_a_file_of_facts(box: Box) -> None:
    box.set(ring="missing", storage=Storage(error="Permission denied"))
    assert [one.severity for one in examine(box.machine)] == ["error", "warning"]
    files = "how-it-works|mindformers|torchrun|taskd|mindio_tft|job_yaml|limits|lightning|megatron"
    assert all(re.match(rf"({files})\.md", one.source) for one in every_check().values())


def test_cann_that_is_there_and_not_sourced_is_reported(box: Box) -> None:
    box.installed(torch_npu="2.13.0")
    box.file("/usr/local/Ascend/ascend-toolkit/latest/lib64/libhccl.so")
    assert box.found()["torch-npu-cann"].fix == "source /usr/local/Ascend/ascend-toolkit/latest/set_env.sh"
    box.env(LD_LIBRARY_PATH="/usr/local/Ascend/ascend-toolkit/latest/lib64")
    assert "torch-npu-cann" not in box.found()


def test_the_limit_that_a_long_save_wants_is_named(box: Box) -> None:
    MINDIO(box)
    storage(box, save_s=200.0)
    found = box.found()["save-limit"]
    assert found.fix.startswith("export TTP_NORMAL_ACTION_TIME_LIMIT=325,")
    assert found.severity == "warning", "lastgasp raises it to the state's size"
    storage(box, save_s=3000.0)
    assert "1800, its most" in box.found()["save-limit"].fix
    assert box.found()["save-limit"].severity == "error"


def test_a_healthy_pod_whose_job_lastgasp_run_starts_has_no_errors(box: Box) -> None:
    """The environment is the pod's, not that of the ranks: what `lastgasp run` sets is not there yet."""
    RECOVERING(box)
    box.installed(torch="2.12.0")
    unset = ("LD_PRELOAD", "HCCL_ASYNC_ERROR_HANDLING", "TTP_PORT")
    box.set(env={name: value for name, value in box.machine.env.items() if name not in unset}, umask=0o077)
    box.env(MASTER_ADDR="job-master-0")
    found = box.found()
    assert set(found) == {"preload-missing", "watchdog-torch", "controller-env", "master-addr"}
    assert {one.severity for one in found.values()} == {"warning"}
    assert all(one.fix.startswith("Start the job with lastgasp run, which does it automatically. Else") for one in
               found.values())  # fmt: skip
    box.env(RANK="1")
    assert box.found()["master-addr"].severity == "error", "it sets the address on the first pod only"
    box.set(found=Found(taskd=box.machine.found.taskd))
    assert box.found()["preload-missing"].severity == "error", "it cannot preload what is not there"


def test_a_log_directory_of_this_users_is_corrected_automatically(box: Box) -> None:
    TASKD(box)
    box.directory("work/taskd_log", 0o755)
    assert box.found()["taskd-log-mode"].severity == "warning"


def test_a_place_that_cannot_be_looked_at_is_reported(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    TASKD(box)

    def refuse(path: Path, *_: object) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", refuse)
    found = box.found()["reset-json"]
    assert found.severity == "warning" and "could not be checked" in found.what


def test_odd_bytes_of_the_environment_can_be_printed(box: Box) -> None:
    box.env(LD_PRELOAD=os.fsdecode(b"/odd\xff.so"))
    assert "/odd\\udcff.so" in box.found()["preload-absent"].what


def test_a_pipe_among_the_certificates_does_not_hang(box: Box) -> None:
    TLS_BOX(box)
    (box.root / "tls/cert.pem").unlink()
    os.mkfifo(box.root / "tls/cert.pem")
    assert "tls-files" not in box.found()


def test_cann_that_the_loader_knows_of_is_enough(box: Box) -> None:
    box.installed(torch_npu="2.13.0")
    box.file("/etc/ld.so.cache", "...libhccl.so\0/opt/cann/libhccl.so")
    assert box.found() == {}
    (box.root / "etc/ld.so.cache").unlink()
    assert "importing torch fails" in box.found()["torch-npu-cann"].what
    box.installed(torch="2.4.0", torch_npu="2.4.0")
    assert "importing torch_npu fails" in box.found()["torch-npu-cann"].what


def test_a_version_that_pip_cannot_find_is_not_told_to_pip(box: Box) -> None:
    box.installed(mindformers="2.1.0", hyper_parallel="1.0", mindspore="2.10.0")
    assert "not on PyPI" in box.found()["mindformers-mindspore"].fix
    box.installed(mindformers="1.6.0", mindspore="2.7.2", numpy="1.26.4")
    assert box.found() == {}, "its own metadata takes any 2.7"
