"""TaskD and ClusterD around a job of torch's: one agent that starts ranks, MindIO's controller, and its choices.

It does what docs/facts/taskd.md §2 says of the real ones: each rank has a process of its own and keeps it when others
end; nothing is restarted but by ClusterD's word, which comes through MindIO's controller (mindio_tft.md §11):
`recover` starts the faulty ranks anew, every other ending ends all processes and starts the job again.
"""

from __future__ import annotations

import argparse
import importlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import TCPStore

from support.ports import free_port

HOST = "127.0.0.1"
LEAVE = 60.0
"""Seconds that ranks get to end by themselves once the controller is done with the job."""
LATER = 2.0
"""The same for those that wait to be taken in, once all that have trained have ended."""
CHOICES = ("retry", "recover", "upgrade", "downgrade", "dump", "exit")
PARAMETERS = {"downgrade": '{"scale-in-strategy": "DP"}', "upgrade": '{"scale-out-strategy": "DP"}'}
PAUSE = "TESTS_PAUSE"
"""A folder: once `pause` is there the job is paused, for as many seconds as that says; `continue` ends it."""
SCALE_OUT = "TESTS_SCALE_OUT"
"""A file: once it is there, ranks that are missing get new processes."""
SWITCH = "TESTS_SWITCH"
"""A folder: once `switch` is there, the rank that it names is to get another node; once `stop` is, it is not.

`TESTS_OLD_POD` says how its old pod is deleted: `kill`; `term`, SIGTERM and five seconds; `late`, when all is over."""
OLD_POD = "TESTS_OLD_POD"
ISOLATED = 201
RESTARTS = 3
KILLED_AFTER = 5.0
"""Seconds from SIGTERM to SIGKILL."""


class ClusterD:
    """What it answers, on a thread of its own, as notifications come from other threads than the callbacks.

    Args:
        api: `mindio_ttp.controller_ttp`. agent: starts and ends processes.
    """

    def __init__(self, api: Any, agent: Agent) -> None:
        self._api, self._agent = api, agent
        self._said: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._stopping = self._pausing = False
        self._switching = -1
        self.over = threading.Event()
        for name in ("report_fault_ranks", "report_stop_complete", "report_strategies", "report_result"):
            api.tft_register_mindx_callback(name, self._teller(name))
        threading.Thread(target=self._answer, daemon=True).start()

    def _teller(self, name: str) -> Any:
        def tell(*given: Any) -> int:
            self._said.put((name, *given))
            return 0

        return tell

    def _answer(self) -> None:
        while True:
            name, *given = self._said.get()
            print(f"mindx: {name} {given}", flush=True)
            getattr(self, name)(*given)

    def report_fault_ranks(self, ranks: Mapping[int, int], codes: Mapping[int, str]) -> None:
        """The second time in one recovery it must not be answered (§11)."""
        if self._switching >= 0:  # it has no rule for a fault in the middle of a switch (taskd.md §4)
            self.over.set()
        elif not self._stopping:
            self._stopping = True
            self._api.tft_notify_controller_stop_train(dict(ranks), "stop")

    def pause(self, folder: Path) -> None:
        """On a thread of its own: wait for the file, and order it."""
        ordered = folder / "pause"
        while not (ordered.exists() and (seconds := ordered.read_text())):  # it is there before it says anything
            time.sleep(0.01)
        self._pausing = True
        answer = self._api.tft_notify_controller_stop_train({}, "pause", int(seconds))
        print(f"mindx: a pause is ordered: {answer}", flush=True)

    def _continue(self, folder: Path) -> None:
        while not (folder / "continue").exists():
            time.sleep(0.01)
        self._api.tft_notify_controller_change_strategy("continue", "")

    def switch(self, folder: Path) -> None:
        """On a thread of its own: wait for the file, order it, and have a new pod started (taskd.md §4)."""
        ordered, stopped = folder / "switch", folder / "stop"
        while not (ordered.exists() and (text := ordered.read_text())):
            time.sleep(0.01)
        self._switching = rank = int(text)
        answer = self._api.tft_notify_controller_prepare_action("hot switch", {rank: 1})
        print(f"mindx: a switch is prepared: {answer}", flush=True)
        self._agent.spare(rank)
        while not stopped.exists():
            time.sleep(0.01)
        answer = self._api.tft_notify_controller_prepare_action("stop switch", {})
        self._switching = -1
        print(f"mindx: the switch is stopped: {answer}", flush=True)
        self._agent.drop_spare(rank)

    def _switched(self, offered: list[str]) -> None:
        """All have stopped: the old pod is deleted before `migration` is said."""
        if offered == ["exit"]:
            self.over.set()
            return
        self._agent.replace(self._switching)
        self._api.tft_notify_controller_change_strategy("migration", "")

    def report_stop_complete(self, code: int, text: str, ranks: Mapping[int, int]) -> None:
        """All faults are known; or all ranks pause."""
        if self._pausing:
            self._pausing = False
            threading.Thread(target=self._continue, args=(Path(os.environ[PAUSE]),), daemon=True).start()
            return
        self._ranks = dict(ranks)
        if code == 0:
            self._api.tft_notify_controller_on_global_rank(self._ranks, 60)
        else:
            self.over.set()

    def report_strategies(self, ranks: Mapping[int, int], offered: list[str]) -> None:
        """The first one of ClusterD's order; whose process is at fault gets a new one with `recover`."""
        if self._switching >= 0:
            self._switched(offered)
            return
        chosen = next(name for name in CHOICES if name in offered)
        print(f"mindx: chosen {chosen}", flush=True)
        self._stopping = False
        self._api.tft_notify_controller_change_strategy(chosen, PARAMETERS.get(chosen, ""))
        if chosen == "recover":
            self._agent.start_anew(sorted(ranks))
        elif chosen == "exit":
            self.over.set()

    def report_result(self, code: int, text: str, ranks: Mapping[int, int], strategy: str) -> None:
        """405: another strategy; 406: a dump; 201: these are missing; otherwise the job is repaired, or over.

        With an upgrade nobody is missing any more. A switch that failed ends the job; nobody is told to dump.
        """
        self._stopping = False
        if self._switching >= 0:
            if code == 0:
                self._agent.delete_old(self._switching)
                self._switching = -1
            else:
                self.over.set()
            return
        if code == ISOLATED:
            self._agent.without(sorted(ranks))
            return
        if code == 405:
            self._api.tft_notify_controller_on_global_rank(dict(ranks), 60)
        elif code == 406:
            self._api.tft_notify_controller_change_strategy("dump", "")
        elif code != 0 or strategy == "dump":
            self.over.set()
        elif strategy == "upgrade":
            self._agent.without([])


class Agent:
    """The ranks' processes.

    Args:
        command: of each rank.
    """

    def __init__(self, ranks: int, command: list[str]) -> None:
        self._ranks, self._command, self._lock = ranks, command, threading.Lock()
        self._of: dict[int, subprocess.Popen[bytes]] = {}
        self._spares, self._old = dict[int, subprocess.Popen[bytes]](), dict[int, subprocess.Popen[bytes]]()
        self._attempt, self._missing = 0, set[int]()

    def run(self) -> int:
        """The job, with its restarts."""
        api: Any = importlib.import_module("mindio_ttp.controller_ttp")
        os.environ["TTP_PORT"] = str(free_port())
        for self._attempt in range(RESTARTS):
            self._store = TCPStore(HOST, 0, None, is_master=True, wait_for_workers=False, multi_tenant=True)
            elastic = "elastic-training" in os.environ.get("HIGH_AVAILABILITY", "").split(",")
            api.tft_init_controller(-1, self._ranks, False, True, elastic)
            self._missing.clear()
            clusterd = ClusterD(api, self)
            api.tft_start_controller(HOST, int(os.environ["TTP_PORT"]), False, "")
            if os.environ.get(PAUSE) and self._attempt == 0:
                threading.Thread(target=clusterd.pause, args=(Path(os.environ[PAUSE]),), daemon=True).start()
            if os.environ.get(SWITCH) and self._attempt == 0:
                threading.Thread(target=clusterd.switch, args=(Path(os.environ[SWITCH]),), daemon=True).start()
            for rank in range(self._ranks):
                self._start(rank, "pod")
            codes = self._wait(clusterd)
            for rank in [*self._spares]:
                self.drop_spare(rank)
            for rank in [*self._old]:
                self.delete_old(rank)
            print(f"agent: attempt {self._attempt} has ended: {codes}", flush=True)
            api.tft_destroy_controller()
            if not any(codes):
                return 0
            os.environ["TTP_PORT"] = str(free_port())
        return 1

    def _start(self, rank: int, kind: str) -> None:
        process = self._process(rank, kind)
        with self._lock:
            self._of[rank] = process

    def _process(self, rank: int, kind: str) -> subprocess.Popen[bytes]:
        env = os.environ | {
            "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(self._ranks), "LOCAL_WORLD_SIZE": "1",
            "GROUP_RANK": str(rank), "GROUP_WORLD_SIZE": str(self._ranks), "MASTER_ADDR": HOST,
            "MASTER_PORT": str(self._store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": str(self._attempt), "TORCHELASTIC_RUN_ID": "job",
            "LASTGASP_ATTEMPT": str(self._attempt), "MINDX_TASK_ID": "task", "POD_IP": HOST,
            "RESTART_FAULT_PROCESS_TYPE": kind,
        }  # fmt: skip
        if kind == "new pod":  # its agent counts otherwise
            del env["LASTGASP_ATTEMPT"]
            env |= {"RESTART_FAULT_PROCESS_TYPE": "pod", "TORCHELASTIC_RESTART_COUNT": str(self._attempt + 7)}
        return subprocess.Popen(self._command, env=env)

    def spare(self, rank: int) -> None:
        """Another pod of that rank, beside the one that trains."""
        self._spares[rank] = self._process(rank, "new pod")

    def drop_spare(self, rank: int) -> None:
        """It is not needed."""
        process = self._spares.pop(rank)
        process.kill()
        process.wait()

    def replace(self, rank: int) -> None:
        """The new pod's process is its rank's from now on; the old one is deleted, if that is not to come late."""
        with self._lock:
            self._old[rank], self._of[rank] = self._of[rank], self._spares.pop(rank)
        if os.environ[OLD_POD] != "late":
            self.delete_old(rank)

    def delete_old(self, rank: int) -> None:
        """As TaskD's agent does it: SIGKILL five seconds behind SIGTERM."""
        process = self._old.pop(rank, None)
        if process is None:
            return
        ended = process.poll()
        if ended is None and os.environ[OLD_POD] == "term":
            process.send_signal(signal.SIGTERM)
            try:
                ended = process.wait(KILLED_AFTER)
            except subprocess.TimeoutExpired:
                pass
        process.kill()
        process.wait()
        how = "is killed" if ended is None else f"has ended by itself: {ended}"
        print(f"agent: the old process of rank {rank} {how}", flush=True)

    def start_anew(self, ranks: list[int], kind: str = "worker") -> None:
        """As TaskD's order 209."""
        for rank in ranks:
            process = self._of[rank]
            process.kill()
            process.wait()
            print(f"agent: rank {rank} is started anew", flush=True)
            self._start(rank, kind)

    def without(self, ranks: list[int]) -> None:
        """These ranks are missing, and no others; their pods are replaced, where that is asked for.

        That a new pod's agent starts its ranks as at the job's start, with the address of the first agent's store, is
        what the notes say of agents; nothing is said of when ClusterD replaces a pod.
        """
        self._missing = set(ranks)
        if ranks and os.environ.get(SCALE_OUT):
            threading.Thread(target=self._replace, args=(ranks, Path(os.environ[SCALE_OUT])), daemon=True).start()

    def _replace(self, ranks: list[int], wanted: Path) -> None:
        attempt = self._attempt
        while not wanted.exists():
            time.sleep(0.01)
        if self._attempt == attempt:
            self.start_anew(ranks, "new pod")

    def _wait(self, clusterd: ClusterD) -> list[int]:
        """Until all have ended; in the end whoever has not is killed, as by TaskD."""
        deadline = float("inf")
        while True:
            with self._lock:
                codes = [process.poll() for process in self._of.values()]
            if self._missing and all(code is not None for rank, code in enumerate(codes) if rank not in self._missing):
                deadline = min(deadline, time.monotonic() + LATER)
            if all(code is not None for code in codes):
                ended = [0 if rank in self._missing else int(code or 0) for rank, code in enumerate(codes)]
                waiting = any(ended) and not clusterd.over.is_set()
                if not waiting or time.monotonic() > deadline:
                    return ended
            if deadline == float("inf") and (clusterd.over.is_set() or all(code is not None for code in codes)):
                deadline = time.monotonic() + LEAVE
            if time.monotonic() > deadline:
                for process in self._of.values():
                    process.kill()
                    process.wait()
            time.sleep(0.02)


def main() -> None:
    """RANKS, then a rank's command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("ranks", type=int)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    sys.exit(Agent(args.ranks, [sys.executable, *args.command]).run())


def command(script: Path, *more: object, ranks: int) -> list[str]:
    """The command line of such a job."""
    return [sys.executable, "-m", "support.mindx", str(ranks), str(script), *map(str, more)]


if __name__ == "__main__":
    main()
