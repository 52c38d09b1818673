"""Settings of where training takes the target's hidden states from. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, fields

from specdraft.core.errors import ConfigError

MODES = ("online", "offline", "hybrid")
PRECISIONS = ("bf16", "fp32", "fp8", "int8")


@dataclass(slots=True, kw_only=True)
class FeaturesConfig:
    """Where the target's hidden states come from in training, and how they are stored."""

    mode: str = "online"
    """online = the target runs in training; offline = they are written to a store first and read from it, the target does not
    run; hybrid = what is not in the store yet is captured in training and stored."""
    precision: str = "bf16"
    """Of the stored states: bf16 (exact for a target in bfloat16), fp32, or one byte each with scales: fp8 (e4m3), int8."""
    dir: str | None = None
    """Folder of the store; null = one in the folder of prepared data, by target, layers, data and precision."""
    budget_gib: float | None = None
    """The most that the store may take; null = what the disk has free. offline is refused beforehand if it needs more, hybrid
    stops storing there."""
    shard_mib: int = 256
    """Size of a file of the store; each process holds up to three of them in memory while it writes."""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"features.mode: unknown, got {self.mode!r}; use {', '.join(MODES)}")
        if self.precision not in PRECISIONS:
            raise ConfigError(f"features.precision: unknown, got {self.precision!r}; use {', '.join(PRECISIONS)}")
        if self.dir is not None and not self.dir:
            raise ConfigError("features.dir: must not be empty, got ''; use null or a folder")
        if self.budget_gib is not None and not 0.0 < self.budget_gib < float("inf"):
            raise ConfigError(f"features.budget_gib: must be positive or null, got {self.budget_gib}; use e.g. 50")
        if self.shard_mib < 1:
            raise ConfigError(f"features.shard_mib: must be at least 1, got {self.shard_mib}; use 256")
        if self.mode == "online":
            for field in fields(self):
                if getattr(self, field.name) != field.default:
                    raise ConfigError(
                        f"features.{field.name}: has no effect with features.mode=online, got "
                        f"{getattr(self, field.name)}; add features=offline or features=hybrid"
                    )
