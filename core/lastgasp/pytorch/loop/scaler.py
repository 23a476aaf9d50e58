"""What a `torch.amp.GradScaler` holds at the end of a step."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def scaler_state(scaler: Any) -> dict[str, Any] | None:
    """Its state; on a device its tensors, because `state_dict` would wait for the device in every step."""
    if scaler is None:
        return None
    tensors = {key: getattr(scaler, key, None) for key in ("_scale", "_growth_tracker")}
    if any(isinstance(t, Tensor) and t.device.type != "cpu" for t in tensors.values()):
        return {key: t.clone() if isinstance(t, Tensor) else None for key, t in tensors.items()}
    return dict(scaler.state_dict())


def scaler_dump(scaler: Any, state: dict[str, Any] | None) -> dict[str, Any] | None:
    """What of `scaler_state` goes into a checkpoint, as `scaler.state_dict` names it."""
    if state is None or "_scale" not in state:
        return state
    whole = dict(scaler.state_dict())
    if state["_scale"] is not None:
        whole["scale"] = float(state["_scale"].item())
    if state["_growth_tracker"] is not None:
        whole["_growth_tracker"] = int(state["_growth_tracker"].item())
    return whole
