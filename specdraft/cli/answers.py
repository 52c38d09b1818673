"""Who writes the answers of a run: the loaded target, with a head or without, servers, or vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdraft.config.experiment import ExperimentRun
from specdraft.core.errors import ConfigError

if TYPE_CHECKING:
    from specdraft.data.answering import AnswerWriter, MakeWriter
    from specdraft.data.chat import ChatRenderer
    from specdraft.decode.proposers import Proposer
    from specdraft.targets.hf import HFTarget


def needs_target(cfg: ExperimentRun) -> bool:
    """Whether preparing the data takes the loaded target."""
    return (cfg.data.regenerate and cfg.data.answers.by == "target") or cfg.data.answers.load_target


def answer_writer(cfg: ExperimentRun, target: HFTarget | None, world_size: int = 1) -> MakeWriter:
    """A function that makes the writer of ``cfg`` for a renderer, when answers are needed.

    Raises (when called):
        ConfigError, CheckpointError: the head does not go with the target, no key, no vLLM.
    """

    def make(renderer: ChatRenderer) -> AnswerWriter:
        from specdraft.targets.facts import read_facts

        answers = cfg.data.answers
        if answers.by == "server":
            from specdraft.data.servers import ServerWriter

            facts = read_facts(cfg.target, renderer.tokenizer)
            return ServerWriter(cfg.data, renderer, facts, target, world_size)
        if answers.by == "vllm":
            from specdraft.data.vllm_answers import VllmWriter

            return VllmWriter(cfg.data, read_facts(cfg.target, renderer.tokenizer), cfg.target.dtype)
        assert target is not None
        from specdraft.decode.answers import DecoderWriter
        from specdraft.decode.engine import SpeculativeDecoder

        proposer = None if answers.head is None else _proposer(cfg, answers.head, target)
        return DecoderWriter(SpeculativeDecoder(target, proposer, target.tokenizer), cfg.data)

    return make


def _proposer(cfg: ExperimentRun, source: str, target: HFTarget) -> Proposer:
    """Drafts of the head in ``source``."""
    from specdraft.decode.proposers import HeadProposer, draft_tree, head_dtype
    from specdraft.heads.storage import check_head_matches, load_head, read_adapter, resolve_head

    folder = resolve_head(source)
    if read_adapter(folder) is not None:
        raise ConfigError(
            f"data.answers.head: was trained with an adapter on the target, which makes it another one, got {source}; "
            "use another head or null"
        )
    head = load_head(folder, device=target.device, dtype=head_dtype(cfg.decode, target)).requires_grad_(False)
    check_head_matches(head, target.spec)
    return HeadProposer(head, target, draft_tree(cfg.decode, head.config.num_draft_tokens))
