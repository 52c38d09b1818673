"""Settings of the target. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, fields
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
    step of each kind), CUDA graphs on a GPU, there also for the passes of eagle, eagle3 and medusa heads that draft for
    single rows. For targets whose layers are those of Llama, Mistral or Qwen."""
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


@dataclass(slots=True, kw_only=True)
class AdapterConfig:
    """A LoRA adapter on the target that is trained together with the head (Medusa-2).

    It makes a target that is easier to draft for, and no longer the original.
    """

    rank: int | None = None
    """Rank of the adapter; null = none, the target stays as it is."""
    alpha: float = 16.0
    """The adapter's output is multiplied by alpha / rank."""
    modules: list[str] | None = None
    """Linear layers of the target's blocks that get one, by the last part of their names; null = all."""
    head_share: float = 0.3
    """Share of training in which the head learns alone before the adapter joins."""
    head_weight: float = 0.2
    """Weight of the head's loss beside the KL from the original target to the adapted one."""
    warmup_share: float = 0.1
    """Share of training over which that weight grows from zero once the adapter has joined."""
    head_lr_multiple: float = 4.0
    """The head's learning rate (optim.lr) as a multiple of the adapter's."""

    def __post_init__(self) -> None:
        if self.rank is None:
            self._check_unused()
            return
        if self.rank < 1:
            raise ConfigError(f"adapter.rank: must be at least 1 or null, got {self.rank}; use e.g. 32")
        if self.modules is not None and (not self.modules or len(set(self.modules)) != len(self.modules)):
            raise ConfigError(f"adapter.modules: must name layers, each once, got {self.modules}; use null for all")
        for name in ("alpha", "head_weight", "head_lr_multiple"):
            if not 0.0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"adapter.{name}: must be positive, got {getattr(self, name)}; use e.g. 1.0")
        for name in ("head_share", "warmup_share"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"adapter.{name}: must lie in 0..1, got {getattr(self, name)}; use e.g. 0.1")
        if self.head_share == 1.0:
            raise ConfigError("adapter.head_share: leaves nothing for the adapter, got 1.0; use less, or adapter=none")

    def _check_unused(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) != field.default:
                raise ConfigError(
                    f"adapter.{field.name}: has no effect without adapter.rank, got {getattr(self, field.name)}; "
                    "add adapter=lora"
                )
