"""What can be known of a target without its weights."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from transformers import GenerationConfig, PreTrainedTokenizerBase

from specdraft.targets._config import TargetConfig
from specdraft.targets.layout import text_config
from specdraft.targets.loading import load_config, resolve_source


@dataclass(frozen=True)
class TargetFacts:
    """Identity and limits of a target that is not loaded."""

    name: str
    source: str
    """Folder or Hub id."""
    revision: str | None
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    max_position_embeddings: int


def read_facts(config: TargetConfig, tokenizer: PreTrainedTokenizerBase) -> TargetFacts:
    """The facts of the target of ``config``, from its config files.

    Raises:
        ConfigError: no such target.
        UnsupportedTargetError: one of a refused kind.
    """
    source = resolve_source(config)
    model_config = load_config(config, source)
    own = text_config(model_config)
    generation = None
    with suppress(OSError):  # many models have none
        generation = GenerationConfig.from_pretrained(source, revision=config.revision or "main")
    positions = (getattr(own, name, None) for name in ("max_position_embeddings", "n_positions"))
    return TargetFacts(
        name=config.name,
        source=source,
        revision=getattr(model_config, "_commit_hash", None) or config.revision,
        eos_token_ids=union_of_eos(model_config, own, generation, tokenizer),
        vocab_size=own.vocab_size,
        max_position_embeddings=next((value for value in positions if value is not None), 2048),
    )


def union_of_eos(*sources: object) -> tuple[int, ...]:
    """The ids that end a text by any of ``sources``: configs and tokenizers of transformers, or None; sorted."""
    ids: set[int] = set()
    for source in sources:
        value = getattr(source, "eos_token_id", None)
        ids.update([value] if isinstance(value, int) else value or [])
    return tuple(sorted(ids))
