"""``specdraft doctor check=lossless``: greedy text and the law of drawn text, with drafts and without."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdraft.config.schema import DoctorRun

if TYPE_CHECKING:
    from specdraft.decode.proposers import HeadProposer
    from specdraft.doctor.findings import Finding
    from specdraft.targets.hf import HFTarget


def lossless_checks(cfg: DoctorRun, target: HFTarget) -> list[Finding]:
    """Greedy identity with transformers over ``rows`` prompts, and a chi-square test of every lossless verifier.

    The prompts are continued one by one and as a batch. Verifiers of drawn drafts are tested where drafts are drawn.

    Raises:
        ConfigError, CheckpointError, DataError: see the messages.
    """
    from specdraft.data.chat import ChatRenderer
    from specdraft.decode._sampling_config import SamplingConfig
    from specdraft.decode.engine import SpeculativeDecoder
    from specdraft.doctor.findings import Finding
    from specdraft.doctor.verdicts import NEAR_TIE, greedy_verdict, sampling_verdict
    from specdraft.eval.lossless import check_greedy, check_sampling, greedy_texts
    from specdraft.eval.prompts import load_sets

    assert target.tokenizer is not None
    renderer = ChatRenderer(target.tokenizer)
    sets = load_sets(cfg.eval.prompts, cfg.rows, cfg.eval.seed)
    texts = [prompt.turns[0] for prompts in sets.values() for prompt in prompts][: cfg.rows]
    prompts = [renderer.prompt_ids([{"role": "user", "content": text}]) for text in texts]
    proposer = checked_proposer(cfg, target)
    decoder = SpeculativeDecoder(target, proposer)
    answers = greedy_texts(target, prompts, cfg.decode.max_new_tokens)
    near_tie = NEAR_TIE[str(target.dtype).removeprefix("torch.")]
    checks = [Finding("greedy", *greedy_verdict(check_greedy(decoder, prompts, answers), near_tie))]
    if len(prompts) > 1:
        together = check_greedy(decoder, prompts, answers, together=True)
        checks.append(Finding(f"greedy, batch of {len(prompts)}", *greedy_verdict(together, near_tie)))
    verifiers = ["point_mass"]
    if proposer.draws:
        verifiers = ["speculative_sampling", *verifiers, *(["block"] if proposer.tree.is_chain else [])]
    for verifier in verifiers:
        settings = SamplingConfig(temperature=1.0, top_p=0.9, verifier=verifier, seed=cfg.seed)
        found = check_sampling(target, decoder, prompts[0], settings, cfg.samples)
        checks.append(Finding(verifier, *sampling_verdict(found)))
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
