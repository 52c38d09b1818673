"""Settings of the target. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specdraft.core.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")
QUANTIZATIONS = ("none", "int8", "int4")
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


@dataclass(slots=True, kw_only=True)
class TargetConfig:
    """Which frozen causal LM is accelerated and how it is loaded."""

    name: str = "smollm2"
    """Hub id, folder, or ``smollm2``: SmolLM2-135M-Instruct as embedded in a package on the registry."""
    revision: str | None = None
    """Branch, tag or commit of a Hub id; null = the default branch."""
    dtype: str = "float32"
    """float32, bfloat16 or float16: dtype of the target's weights and of its hidden states."""
    device: str = "auto"
    """auto = the accelerator if there is one, else the CPU; or cpu, cuda, cuda:1, ..."""
    attn_implementation: str = "sdpa"
    """Attention kernel of transformers: sdpa or eager (both take tree masks)."""
    trust_remote_code: bool = False
    """Run modelling code that comes with the checkpoint."""
    pack_weights: bool = True
    """On a CPU, keep linear layers also in the layout of the CPU kernels: faster steps for a copy of the weights."""
    compile: bool = False
    """Compile the forward over a draft: fewer kernels on a CPU (needs a C++ compiler, and up to a minute for the first
    step of each kind), CUDA graphs on a GPU. For targets whose layers are those of Llama, Mistral or Qwen."""
    device_map: Any = None
    """null = all of it on ``device``; auto, balanced, balanced_low_0 or sequential = spread over the devices by
    accelerate; or a map from modules to devices, e.g. {model.embed_tokens: 0, model.layers: cpu, ...}, ``disk`` included."""
    quantization: str = "none"
    """Bits of the layers' weights: none, int8 or int4 (nf4), by bitsandbytes when the target is loaded."""

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("target.name: must not be empty, got ''; give a Hub id, a folder or smollm2")
        if self.dtype not in DTYPES:
            raise ConfigError(f"target.dtype: unknown dtype, got {self.dtype!r}; use one of {', '.join(DTYPES)}")
        if self.attn_implementation not in ("sdpa", "eager"):
            raise ConfigError(
                f"target.attn_implementation: takes no tree masks, got {self.attn_implementation!r}; use sdpa or eager"
            )
        if self.quantization not in QUANTIZATIONS:
            raise ConfigError(
                f"target.quantization: unknown, got {self.quantization!r}; use one of {', '.join(QUANTIZATIONS)}"
            )
        self._check_device_map()

    def _check_device_map(self) -> None:
        devices = self.device_map
        if devices is None:
            return
        is_map = isinstance(devices, dict) and bool(devices)
        if is_map:
            is_map = all(isinstance(name, str) and isinstance(place, str | int) for name, place in devices.items())
        if devices not in DEVICE_MAPS and not is_map:
            raise ConfigError(
                f"target.device_map: needs {', '.join(DEVICE_MAPS)}, a map from modules to devices, or null, got {devices!r}; "
                "use e.g. auto"
            )
        if self.device != "auto":
            raise ConfigError(
                f"target.device_map: contradicts target.device={self.device}, got {devices!r}; leave the device at auto"
            )
