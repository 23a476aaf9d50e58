"""The proxy of a pod."""

from __future__ import annotations

from typing import Any

from lastgasp_taskd import network

__all__ = ["destroy_taskd_proxy", "init_taskd_proxy"]


def init_taskd_proxy(config: dict[str, Any]) -> bool:
    """Check the addresses. True at once: no proxy is needed."""
    return network.init_proxy(config)


def destroy_taskd_proxy() -> bool:
    """True."""
    return network.destroy_proxy()
