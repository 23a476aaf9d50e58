"""The checks of arguments, as strict as those of MindIO's binding (docs/facts/mindio_tft.md §1, §2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lastgasp.adapter import ConfigError

MOST_RANKS = 100_000
MOST_TYPES = 1000
PORTS = (1024, 65535)
_REMEDY = "See docs/mindio-drop-in.md."


def strict(**given: tuple[object, type]) -> None:
    """Check types: a bool is wanted as such; an int may be a bool, but no float, NumPy integer or Enum member.

    Raises:
        TypeError: a value of another type.
    """
    for name, (value, kind) in given.items():
        allowed = (int, bool) if kind is int else (kind,)
        if type(value) not in allowed:
            raise TypeError(f"{name}={value!r} is a {type(value).__name__}, not a {kind.__name__}")


def within(name: str, value: int, least: int, most: int) -> None:
    """Check a number. Raises ConfigError."""
    if not least <= value <= most:
        raise ConfigError(name, value, f"an integer from {least} to {most}", _REMEDY)


def callable_or_raise(func: object) -> None:
    """Check a handler. Raises TypeError."""
    if not callable(func):
        raise TypeError(f"func={func!r} is not callable")


def address(host: str, port: int) -> None:
    """Check an address that MindIO would listen at, or connect to. Raises ConfigError."""
    if host in ("", "0.0.0.0", "::"):
        raise ConfigError("ip", host, "an address or a host name, not all zero", _REMEDY)
    within("port", port, *PORTS)


def replica_info(rank: int, info: object) -> list[dict[str, object]]:
    """Return what `tft_set_optimizer_replica` was given, checked.

    Raises:
        ConfigError: a key is missing, a number is out of its range, or this rank is in none of the lists.
    """
    if not isinstance(info, list) or not 1 <= len(info) <= MOST_TYPES:
        raise ConfigError("replica_info", info, f"a list of 1 to {MOST_TYPES} dicts", _REMEDY)
    return [_entry(rank, entry) for entry in info]


def _entry(rank: int, entry: object) -> dict[str, object]:
    allowed = "a dict of rank_list, replica_cnt (1 to its length, a divisor of it) and replica_shift"
    if not isinstance(entry, Mapping) or not {"rank_list", "replica_cnt", "replica_shift"} <= set(entry):
        raise ConfigError("replica_info", entry, allowed, _REMEDY)
    ranks, count, shift = list(entry["rank_list"]), entry["replica_cnt"], entry["replica_shift"]
    for each in (*ranks, count, shift):
        strict(replica_info=(each, int))
    if not ranks or len(set(ranks)) != len(ranks) or not 1 <= count <= len(ranks) or len(ranks) % count:
        raise ConfigError("replica_info", entry, allowed, _REMEDY)
    if rank not in ranks:
        raise ConfigError("rank_list", ranks, f"a list with rank {rank} in it", _REMEDY)
    return {"rank_list": ranks, "replica_cnt": count, "replica_shift": shift}


Handler = Callable[..., object]
