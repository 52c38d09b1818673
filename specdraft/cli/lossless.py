"""``specdraft doctor check=lossless``: greedy text and the law of drawn text, with drafts and without."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdraft.config.schema import DoctorRun

if TYPE_CHECKING:
    from specdraft.data.preview import Check
    from specdraft.decode.proposers import HeadProposer
    from specdraft.eval.lossless import ChiSquare, GreedyIdentity
    from specdraft.targets.hf import HFTarget

LEAST_PVALUE = 1e-3
"""Below it, chance does not explain the difference of two laws."""


def lossless_checks(cfg: DoctorRun, target: HFTarget) -> list[Check]:
    """Greedy identity with transformers over ``rows`` prompts, and a chi-square test of every lossless verifier.

    Raises:
        ConfigError, CheckpointError, DataError: see the messages.
    """
    from specdraft.data.chat import ChatRenderer
    from specdraft.data.preview import Check
    from specdraft.decode._sampling_config import SamplingConfig
    from specdraft.decode.engine import SpeculativeDecoder
    from specdraft.eval.lossless import check_greedy, check_sampling
    from specdraft.eval.prompts import load_sets

    assert target.tokenizer is not None
    renderer = ChatRenderer(target.tokenizer)
    sets = load_sets(cfg.eval.prompts, cfg.rows, cfg.eval.seed)
    texts = [prompt.turns[0] for prompts in sets.values() for prompt in prompts][: cfg.rows]
    prompts = [renderer.prompt_ids([{"role": "user", "content": text}]) for text in texts]
    proposer = checked_proposer(cfg, target)
    decoder = SpeculativeDecoder(target, proposer)
    checks = [Check("greedy", *greedy_verdict(check_greedy(target, decoder, prompts, cfg.decode.max_new_tokens)))]
    verifiers = ["speculative_sampling", "point_mass", *(["block"] if proposer.tree.is_chain else [])]
    for verifier in verifiers:
        settings = SamplingConfig(temperature=1.0, top_p=0.9, verifier=verifier, seed=cfg.seed)
        found = check_sampling(target, decoder, prompts[0], settings, cfg.samples)
        checks.append(Check(verifier, *sampling_verdict(found)))
    return checks


def checked_proposer(cfg: DoctorRun, target: HFTarget) -> HeadProposer:
    """The trained head that is named, else an untrained one; its draft has the shape of ``decode``."""
    from specdraft.decode.proposers import HeadProposer, draft_tree, head_dtype
    from specdraft.heads.base import head_config
    from specdraft.heads.storage import check_head_matches, load_head, resolve_head

    if cfg.trained is not None:
        folder = resolve_head(cfg.trained, None)
        head = load_head(folder, device=target.device, dtype=head_dtype(cfg.decode, target))
        check_head_matches(head, target.spec)
    else:
        from dataclasses import asdict

        # With all tokens in the draft vocabulary no data is needed to choose them.
        left_out = ("kind", "draft_vocab_size", "draft_vocab_coverage")
        settings = {key: value for key, value in asdict(cfg.head).items() if key not in left_out}
        head = head_config(cfg.head.kind, settings).build(target.spec)
        head.to(device=target.device, dtype=target.dtype)
        head.init_from_target(target.embed, target.unembedding)
    tree = draft_tree(cfg.decode, head.config.num_draft_tokens)
    return HeadProposer(head.eval().requires_grad_(False), target, tree, cfg.decode.min_confidence)


def greedy_verdict(found: GreedyIdentity) -> tuple[str, str]:
    """Verdict and detail of the greedy check."""
    text = f"{found.identical} of {found.num_prompts} answers are those of transformers"
    if found.first_difference is not None:
        prompt, place = found.first_difference
        text += f"; prompt {prompt} differs from token {place}, where the two best logits are {found.margin:.2e} apart"
        # In lower precision a near tie can go either way, which the margin tells from a fault.
        return "fault" if found.margin is None or found.margin > 0.5 else "warning", text
    if not found.accepted:
        return "warning", f"{text}, but no draft was accepted, which shows little; name a trained head"
    return "ok", f"{text}, with {found.accepted} drafted tokens accepted"


def sampling_verdict(found: ChiSquare) -> tuple[str, str]:
    """Verdict and detail of a chi-square test."""
    text = (
        f"{found.samples} answers at temperature 1, top_p 0.9: chi-square {found.statistic:.1f} over {found.cells} cells, "
        f"p = {found.pvalue:.3f}, {found.accepted} drafted tokens accepted"
    )
    if found.pvalue < LEAST_PVALUE:
        return "fault", f"{text}; the law of the text is not the target's"
    return ("ok", text) if found.accepted and found.cells > 1 else ("warning", f"{text}; too few to show anything")
