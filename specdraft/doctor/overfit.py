"""Training one text by heart: the shortest proof that what is trained is what is decoded."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from specdraft.core.types import TokenBatch
from specdraft.data.batching import collate
from specdraft.data.chat import TokenRow, pad_token_id
from specdraft.eval.acceptance import AcceptancePoint, measure_acceptance
from specdraft.eval.lossless import greedy_texts
from specdraft.heads.base import DraftHead
from specdraft.losses.alignment import build_draft_batch
from specdraft.losses.objectives import Objective, Teacher
from specdraft.train.optim import build_optimizer

if TYPE_CHECKING:
    from specdraft.doctor.case import Case

ANSWER_TOKENS = 40
CLIP = 1.0
LOOK_EVERY = 25
"""Steps between two looks at whether the text is known."""
KNOWN = 0.995
"""Share of its anchors, at every depth, whose token must be drafted first."""
MARGIN = 0.9
"""Share of the best possible acceptance length that a head which knows the text reaches."""


@dataclass(frozen=True)
class Overfit:
    """What came of it. head: as trained, in float32. prompt, answer: the text. losses: first and last. steps, seconds: spent.

    agreement: share of anchors whose token is drafted first, over all depths. acceptance: of decoding the same prompt.
    untouched: names of parameters that training did not change. known: whether the text was known before time ran out.
    """

    head: DraftHead
    prompt: list[int]
    answer: list[int]
    losses: tuple[float, float]
    agreement: float
    acceptance: AcceptancePoint
    untouched: list[str]
    steps: int
    seconds: float
    known: bool

    @property
    def best(self) -> float:
        """The acceptance length of drafts that are all right, over an answer of this length."""
        depth = self.head.config.num_draft_tokens
        # The first token comes with the prompt; the last step drafts no more than the answer has left.
        rest = len(self.answer) - 1
        return rest / max(1, -(-rest // (depth + 1)))


def overfit(case: Case, prompt: list[int]) -> Overfit:
    """Trains a head of the case's settings on what the target writes greedily after ``prompt``, then decodes that prompt.

    The loss, the alignment and the optimizer are those of training, in float32 and at a constant learning rate.
    """
    target, start = case.target, time.perf_counter()
    room = target.spec.max_position_embeddings - ANSWER_TOKENS
    prompt = prompt[-room:] if len(prompt) > room else prompt
    (answer,) = greedy_texts(target, [prompt], ANSWER_TOKENS)
    row = TokenRow([*prompt, *answer], [False] * len(prompt) + [True] * len(answer))
    tokens = collate([row], pad_token_id(case.tokenizer), [0]).to(target.device)
    head = _head(case, answer)
    before = {name: parameter.detach().clone() for name, parameter in head.named_parameters()}
    losses, agreement, steps, known = _train(case, head, tokens, start)
    untouched = [name for name, parameter in head.named_parameters() if torch.equal(parameter, before[name])]
    head.eval()
    acceptance = measure_acceptance(target, head, [prompt], None, ANSWER_TOKENS)
    seconds = time.perf_counter() - start
    return Overfit(head, prompt, answer, losses, agreement, acceptance, untouched, steps, seconds, known)


def _head(case: Case, answer: list[int]) -> DraftHead:
    """A copy of the untrained head whose draft vocabulary holds the answer."""
    target, config = case.target, case.head.config
    head = config.build(target.spec).to(device=target.device, dtype=torch.float32)
    head.load_state_dict(
        {name: value.float() if value.is_floating_point() else value for name, value in case.head.state_dict().items()}
    )
    for mine, given in zip(head.parameters(), case.head.parameters(), strict=True):
        mine.requires_grad_(given.requires_grad)
    if head.vocab is not None:
        chosen = head.vocab.draft_token_ids().tolist()
        missing = sorted(set(answer) - set(chosen))
        others = [token for token in chosen if token not in set(answer)]
        if missing and len(others) >= len(missing):
            dropped = set(others[-len(missing) :])
            head.vocab.set_tokens([*(token for token in chosen if token not in dropped), *missing])
            head.init_from_target(target.embed, target.unembedding)
    return head.train()


def _train(
    case: Case, head: DraftHead, tokens: TokenBatch, start: float
) -> tuple[tuple[float, float], float, int, bool]:
    """((first, last loss), agreement, steps, whether the text was known in time)."""
    target, optim = case.target, case.job.optim
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    if not trained:
        return (0.0, 0.0), 0.0, 0, False
    optimizer = build_optimizer(head, optim)
    objective = Objective(replace(case.job.loss, normalize="token"))
    batch = build_draft_batch(tokens, target.capture(tokens, head.features()))
    teacher = _teacher(case, head)
    denominator = float(objective.denominator(tokens))
    losses: list[float] = []
    agreement, known = 0.0, False
    steps = 0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(case.seed)
        while steps < case.overfit_steps and time.perf_counter() - start < case.overfit_seconds:
            result = objective(head(batch, target.embed, target.unembedding), batch, teacher)
            loss = result.loss_sum / denominator
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, optim.max_grad_norm or CLIP)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(float(loss.detach()))
            steps += 1
            agreement = min(result.stats.agreement, default=0.0)
            if steps % LOOK_EVERY == 0 and agreement >= KNOWN:
                known = True
                break
    return (losses[0], losses[-1]) if losses else (0.0, 0.0), agreement, steps, known


def _teacher(case: Case, head: DraftHead) -> Teacher:
    """As ``TrainInputs.teacher``."""
    unembed = case.target.unembedding
    return Teacher(unembed, head.draft_unembedding(unembed), head.label_map())
