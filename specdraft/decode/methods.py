"""From the settings of a proposer without a trained head to the proposer."""

from __future__ import annotations

from specdraft.decode._proposer_config import DraftModelConfig, PromptLookupConfig, ProposerConfig, SuffixConfig
from specdraft.decode.draft_model import draft_model_proposer
from specdraft.decode.prompt_lookup import PromptLookupProposer
from specdraft.decode.proposers import Proposer
from specdraft.decode.suffix import SuffixProposer
from specdraft.targets.hf import HFTarget


def make_proposer(config: ProposerConfig, target: HFTarget) -> Proposer | None:
    """The proposer of ``config`` for ``target``; None for plain decoding.

    Raises:
        ConfigError: a draft model of another vocabulary or with too few layers.
        CheckpointError, UnsupportedTargetError: a draft model that cannot be loaded or used.
    """
    if isinstance(config, DraftModelConfig):
        return draft_model_proposer(config, target)
    if isinstance(config, PromptLookupConfig):
        return PromptLookupProposer(config, target.device)
    if isinstance(config, SuffixConfig):
        return SuffixProposer(config, target.device)
    if config.kind != "none":
        raise ValueError(f"a proposer of kind {config.kind!r} is not made from settings")
    return None
