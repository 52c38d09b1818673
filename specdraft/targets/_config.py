"""Settings of the target. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from specdraft.core.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")


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

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("target.name: must not be empty, got ''; give a Hub id, a folder or smollm2")
        if self.dtype not in DTYPES:
            raise ConfigError(f"target.dtype: unknown dtype, got {self.dtype!r}; use one of {', '.join(DTYPES)}")
        if self.attn_implementation not in ("sdpa", "eager"):
            raise ConfigError(
                f"target.attn_implementation: takes no tree masks, got {self.attn_implementation!r}; use sdpa or eager"
            )
