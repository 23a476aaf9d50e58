"""The record of a fault that MindIO has repaired in place: nobody but the rank that had it knows of it."""

from __future__ import annotations

import logging
import threading

from lastgasp import _clock, narration
from lastgasp.config import GaspConfig
from lastgasp.events import Fault, Incident, Phases
from lastgasp.gasp.attempt import new_incident
from lastgasp.gasp.hello import hello_of
from lastgasp.gasp.records import write_incident
from lastgasp.ports import Repaired
from lastgasp.topology import Place

log = logging.getLogger("lastgasp")


def keep_record(
    config: GaspConfig, place: Place, fault: Fault, repaired: Repaired, leader: str, from_files: bool
) -> None:
    """Log it and write its incident, on a thread of its own: nobody waits for the disk.

    Args:
        fault: of this rank. leader: who has decided, MindIO or TaskD by it. from_files: all begin with the checkpoint.
    """
    now = _clock.wall_ns()
    incident = new_incident(hello_of(config, place), repaired.number, now, led_by=leader)
    incident.backend, incident.ending, incident.rung, incident.faults = "mindio", "in_place", "retry", [fault]
    incident.from_files = from_files
    incident.step_saved, incident.steps_lost = repaired.step, max(0, fault.step - repaired.step)
    incident.phases = Phases(fault=fault.seen_ns, detected=fault.seen_ns, released=now)
    log.warning("%s", narration.event(incident))
    threading.Thread(target=_write, args=(incident, config), name="lastgasp-mindio-record", daemon=True).start()


def _write(incident: Incident, config: GaspConfig) -> None:
    try:
        write_incident(incident, config.directory)
    except OSError as error:
        log.warning("the incident %s cannot be written: %s", incident.id, error)
