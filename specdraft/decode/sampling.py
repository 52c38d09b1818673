"""From logits to the distribution that plain sampling has, for every node of a draft tree with its own prefix."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdraft.core.errors import ConfigError
from specdraft.decode._sampling_config import SamplingConfig
from specdraft.decode.plan import TreePlan

NUCLEUS_TRIES = (64, 512)
"""Most likely tokens among which the nucleus of a row is looked for before all are sorted, on a CPU."""
ABSENT = -1
"""In place of a token where there is none."""


class RowRandom:
    """Uniform numbers of one row: a generator of its own, so that other rows and other code leave it alone.

    The numbers that decide which token stands at a position come in the order of the positions, so two ways of
    decoding that draw each token with its position's number write the same text.

    Args:
        seed: 0 to 2^63 - 1.
        device: where the numbers are used. They are drawn on the host, alike for every device.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._device = device
        self._ahead = torch.empty(0, dtype=torch.float64)

    def ahead(self, count: int) -> Tensor:
        """``[count]`` float64 in [0, 1): the numbers of the next ``count`` positions, the same until ``consume``."""
        missing = count - self._ahead.numel()
        if missing > 0:
            self._ahead = torch.cat([self._ahead, self._draw(missing)])
        return self._ahead[:count].to(self._device)

    def consume(self, count: int) -> None:
        """Goes on by ``count`` positions."""
        self._ahead = self._ahead[count:]

    def fresh(self, count: int) -> Tensor:
        """``[count]`` float64 in [0, 1) that nobody has seen or will see again."""
        return self._draw(count).to(self._device)

    def _draw(self, count: int) -> Tensor:
        return torch.rand(count, generator=self._generator, dtype=torch.float64)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """One token a row in proportion to ``weights``, by inversion of the cumulated weights.

    Args:
        weights: ``[n, V]``, not negative; rows need not sum to one. A row of zeros gives token V - 1.
        uniform: ``[n]`` float64 in [0, 1).

    Returns:
        ``[n]`` int64. A token of weight 0 is never drawn from a row that has others.
    """
    # Double precision: rounding of a long sum would shift the odds of its last tokens.
    cumulated = weights.cumsum(dim=-1, dtype=torch.float64)
    found = torch.searchsorted(cumulated, uniform[:, None] * cumulated[:, -1:], right=True)
    return found[:, 0].clamp_max(weights.shape[-1] - 1)


def truncate(scores: Tensor, config: SamplingConfig) -> Tensor:
    """Temperature, then top_k, top_p and min_p: ``[n, V]`` float32 logits -> logits, -inf where a token is left out.

    Order, ties and the one token that always stays are those of transformers' generate().
    """
    scores = scores / config.temperature
    if config.top_k is not None and config.top_k < scores.shape[-1]:
        kth = scores.topk(config.top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < kth, -torch.inf)
    if config.top_p is not None and config.top_p < 1.0:
        scores = _nucleus(scores, config.top_p)
    if config.min_p is not None:
        probs = scores.softmax(dim=-1)
        scores = scores.masked_fill(probs < config.min_p * probs.amax(dim=-1, keepdim=True), -torch.inf)
    return scores


def _nucleus(scores: Tensor, top_p: float) -> Tensor:
    """The most likely tokens of every row until together they reach ``top_p``; the one that reaches it is in."""
    total = scores.logsumexp(dim=-1, keepdim=True)
    size = scores.shape[-1]
    # Sorting all tokens costs several times a step's other work on a CPU, where a look at the result costs nothing.
    tries = [count for count in NUCLEUS_TRIES if count < size] if scores.device.type == "cpu" else []
    found, rows = scores, None
    for count in (*tries, size):
        own, mass = (scores, total) if rows is None else (scores[rows], total[rows])
        values, tokens = own.topk(count, dim=-1) if count < size else own.sort(dim=-1, descending=True)
        probs = (values - mass).exp()
        before = probs.cumsum(dim=-1) - probs
        kept = before < top_p
        kept[:, 0] = True
        shaped = torch.full_like(own, -torch.inf).scatter_(1, tokens, values.masked_fill(~kept, -torch.inf))
        found = shaped if rows is None else found.index_copy(0, rows, shaped)
        if count < size:
            short = (before[:, -1] + probs[:, -1] < top_p).nonzero()[:, 0]
            if not short.numel():
                break
            rows = short if rows is None else rows[short]
    return found


class WarpedSampler:
    """Draws drafts of a row from a proposer's logits, warped as the target's own are: see ``core.types.DraftSampler``."""

    def __init__(self, config: SamplingConfig, random: RowRandom) -> None:
        self._config = config
        self._random = random

    def __call__(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """``[m, D]`` logits -> ``[m, count]`` ids, drawn one after another without replacement, ``[m, D]`` probs."""
        probs = truncate(logits.float(), self._config).softmax(dim=-1)
        left = probs
        drawn = []
        for i in range(count):
            ids = draw(left, self._random.fresh(logits.shape[0]))[:, None]
            drawn.append(ids)
            if i + 1 < count:
                left = left.scatter(1, ids, 0.0)
        return torch.cat(drawn, dim=1), probs


class LogitsRules:
    """Bias, penalties, bad words and the least length, of one row.

    Args:
        config: the settings; ``bad_words`` already turned into ids.
        bad_words: sequences of token ids that are never written.
        vocab_size: V.
        eos: tokens that ``min_new_tokens`` holds back.
        prompt: ``[P]`` int64.

    Raises:
        ConfigError: a token id is not below V.
    """

    def __init__(
        self,
        config: SamplingConfig,
        bad_words: Sequence[Sequence[int]],
        vocab_size: int,
        eos: frozenset[int],
        prompt: Tensor,
    ) -> None:
        self._config = config
        device = prompt.device
        self._emitted = 0
        self._bias = self._static_bias(bad_words, vocab_size, device)
        self._eos = torch.tensor(sorted(eos), dtype=torch.int64, device=device)
        if config.min_new_tokens and not eos:
            raise ConfigError(
                f"sampling.min_new_tokens: has no effect where no token ends the text, got {config.min_new_tokens}; use 0"
            )
        self._seen: Tensor | None = None
        self._counts: Tensor | None = None
        if config.counts_tokens:
            self._counts = torch.zeros(vocab_size, device=device)
            self._seen = torch.zeros(vocab_size, device=device).index_add_(
                0, prompt, torch.ones(prompt.shape, device=device)
            )
        longer = [word for word in bad_words if len(word) > 1]
        self._words: Tensor | None = None
        self._recent = prompt
        if longer:
            width = max(map(len, longer)) - 1
            padded = [[ABSENT] * (width + 1 - len(word)) + list(word) for word in longer]
            self._words = torch.tensor(padded, dtype=torch.int64, device=device)
            # One more than a word's beginning: nothing of the text may be taken for the padding of a short prompt.
            filler = torch.full((width,), ABSENT - 1, dtype=torch.int64, device=device)
            self._recent = torch.cat([filler, prompt])[-width:]

    def _static_bias(self, bad_words: Sequence[Sequence[int]], vocab_size: int, device: torch.device) -> Tensor | None:
        """``[V]``: what does not depend on the prefix, words of a single token included."""
        for key, ids in (
            ("logit_bias", [int(pair[0]) for pair in self._config.logit_bias]),
            ("bad_words", [token for word in bad_words for token in word]),
        ):
            if ids and max(ids) >= vocab_size:
                raise ConfigError(
                    f"sampling.{key}: the target has {vocab_size} tokens, got {max(ids)}; use smaller ids"
                )
        single = [word[0] for word in bad_words if len(word) == 1]
        if not self._config.logit_bias and not single:
            return None
        bias = torch.zeros(vocab_size)
        for token, value in self._config.logit_bias:
            bias[int(token)] = value
        bias[single] = -torch.inf
        return bias.to(device)

    def __call__(self, logits: Tensor, tokens: Tensor, plan: TreePlan) -> Tensor:
        """Logits ``[N+1, V]`` after each row of the tree -> the same in float32 with every rule applied.

        tokens: ``[N+1]`` int64, the root (which the text already ends with) and the drafted tokens.
        """
        scores = logits.float()
        if self._bias is not None:
            scores = scores + self._bias
        if self._seen is not None and self._counts is not None:
            scores = self._penalised(scores, tokens, plan, self._seen, self._counts)
        if self._words is not None:
            # index_add, since several words may end in the same token.
            hits = self._matches(tokens, plan, self._words)
            scores = scores.index_add(
                1, self._words[:, -1], torch.zeros(hits.shape, device=hits.device).masked_fill_(hits, -torch.inf)
            )
        if self._emitted < self._config.min_new_tokens:
            early = self._emitted + plan.ranking - 1 < self._config.min_new_tokens
            hold = torch.zeros(early.shape, device=early.device).masked_fill_(early, -torch.inf)
            scores = scores.index_add(1, self._eos, hold[:, None].expand(-1, self._eos.numel()))
        return scores

    def extend(self, tokens: Tensor) -> None:
        """Takes in what was written: ``[n]`` int64."""
        self._emitted += tokens.numel()
        if self._seen is not None and self._counts is not None:
            ones = torch.ones(tokens.shape, device=tokens.device)
            self._seen.index_add_(0, tokens, ones)
            self._counts.index_add_(0, tokens, ones)
        if self._words is not None:
            self._recent = torch.cat([self._recent, tokens])[-self._recent.numel() :]

    def _penalised(self, scores: Tensor, tokens: Tensor, plan: TreePlan, seen: Tensor, counts: Tensor) -> Tensor:
        """Penalties by the text so far for all tokens, then anew for those that a node's own path holds, too."""
        shaped = self._penalise(scores, seen, counts)
        if plan.size == 1:
            return shaped
        same = (tokens[:, None] == tokens).float()
        path = (~plan.unrelated).float() @ same  # [N+1, N+1]: how often a row's path holds each row's token
        again = self._penalise(scores[:, tokens], seen[tokens] + path, counts[tokens] + path)
        # A token drafted twice is written twice, with the same value.
        return shaped.scatter(1, tokens.expand(plan.size, -1), again)

    def _penalise(self, scores: Tensor, seen: Tensor, counts: Tensor) -> Tensor:
        config = self._config
        if config.repetition_penalty != 1.0:
            penalty = config.repetition_penalty
            scores = torch.where(seen > 0, torch.where(scores < 0, scores * penalty, scores / penalty), scores)
        if config.presence_penalty:
            scores = scores - config.presence_penalty * (counts > 0)
        if config.frequency_penalty:
            scores = scores - config.frequency_penalty * counts
        return scores

    def _matches(self, tokens: Tensor, plan: TreePlan, words: Tensor) -> Tensor:
        """``[N+1, S]`` bool: a row's prefix ends in all of a word but its last token."""
        width = words.shape[1] - 1
        # The root is the last of the text and the first of every path.
        text = torch.cat([self._recent[:-1].expand(plan.size, -1), tokens[plan.paths]], dim=1)
        places = (plan.ranking - 1)[:, None] + torch.arange(width, device=tokens.device)
        ends = text.gather(1, places)
        beginnings = words[:, :-1]
        return ((ends[:, None] == beginnings) | (beginnings == ABSENT)).all(dim=-1)
