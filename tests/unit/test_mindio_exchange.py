"""How the ranks of a drop-in job learn of one another before their first update."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore

exchange: Any = pytest.importorskip("lastgasp_mindio.exchange")


def test_who_waits_for_another_rank_holds_up_nobody() -> None:
    """torch's own wait holds the client until it is over, and with it all that use the same one."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    came: list[bool] = []
    waits = threading.Thread(target=lambda: came.append(exchange._came(PrefixStore("p", store), "it", 300.0)))
    waits.start()
    other = threading.Thread(target=store.set, args=("another", "x"))
    other.start()
    other.join(30)
    assert not other.is_alive() and waits.is_alive()
    store.set("p/it", "x")
    waits.join(60)
    assert came == [True]


def test_who_does_not_come_is_not_waited_for_longer() -> None:
    assert not exchange._came(HashStore(), "it", 0.0)
