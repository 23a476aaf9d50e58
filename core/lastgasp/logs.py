"""Destination and format of lastgasp's log lines if logging is not configured.

Everything is logged under `lastgasp`. A program that configures logging gets these records like any others, and this
module adds nothing. Where neither the root logger nor `lastgasp` has a handler, lines go to standard error with time
and rank. `LASTGASP_LOG` sets how much: `quiet` (warnings and errors), `normal` (one line per event as well), `debug`,
or `json` (as `normal`, one JSON object per line).
"""

from __future__ import annotations

import json
import logging
import os
import time

from .output import write_error

VARIABLE = "LASTGASP_LOG"
LEVELS = {"quiet": logging.WARNING, "normal": logging.INFO, "debug": logging.DEBUG, "json": logging.INFO}
_ROOT = "lastgasp"
own_rank = ""
"""This process's, where `RANK` is that of another one meanwhile."""


class _Handler(logging.Handler):
    """Writes to the current standard error, unless other handlers receive the record as well."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers or any(not isinstance(one, _Handler) for one in _own().handlers):
            return
        write_error(self.format(record))

    def __repr__(self) -> str:
        return f"<{VARIABLE}>"


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        loud = f"{record.levelname.lower()}: " if record.levelno >= logging.ERROR else ""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        return f"[lastgasp {clock}{_who()}] {loud}{text}"


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        rank = _rank() if _who() else None
        return json.dumps(
            {
                "time": record.created,
                "level": record.levelname.lower(),
                "logger": record.name,
                "rank": int(rank) if rank is not None and rank.isdigit() else None,
                "message": super().format(record),
            }
        )


def _who() -> str:
    """The rank prefix; empty in a launcher or controller, which have no rank."""
    rank = _rank() if os.environ.get("LOCAL_RANK") else None
    return f" rank {rank}" if rank is not None else ""


def _rank() -> str | None:
    return own_rank or os.environ.get("RANK")


def _own() -> logging.Logger:
    return logging.getLogger(_ROOT)


def set_up() -> None:
    """Set up logging for this process. Idempotent; a level that is already set stays. Never raises: a wrong
    `LASTGASP_LOG` is logged and counts as `normal`."""
    logger, chosen = _own(), (os.environ.get(VARIABLE) or "normal").strip().lower()
    if any(isinstance(one, _Handler) for one in logger.handlers):
        return
    if logger.level == logging.NOTSET:
        logger.setLevel(LEVELS.get(chosen, logging.INFO))
    handler = _Handler()
    handler.setFormatter(_Json() if chosen == "json" else _Text())
    logger.addHandler(handler)
    if chosen not in LEVELS:
        logger.warning("%s=%s is not known and counts as normal; allowed: %s", VARIABLE, chosen, ", ".join(LEVELS))
