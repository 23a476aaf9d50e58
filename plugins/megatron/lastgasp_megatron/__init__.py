"""Resilience for Megatron-LM and MindSpeed-LLM: `import lastgasp_megatron; lastgasp_megatron.install()`."""

from __future__ import annotations

from lastgasp_megatron.installation import install, uninstall

__all__ = ["install", "uninstall"]
