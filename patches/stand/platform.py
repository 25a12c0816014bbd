"""The out-of-tree SGLang platform of the stand: a CPU."""

from __future__ import annotations

from typing import Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform


class StandPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]  # SGLang is untyped here
    """A CPU with none of the optional capabilities, so that SGLang takes its torch paths (0.5.23)."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        """`torch_native`, the one backend that runs without compiled CPU kernels."""
        return "torch_native"

    def is_pin_memory_available(self, device: Any = None) -> bool:
        """False: pinning needs a GPU driver."""
        return False
