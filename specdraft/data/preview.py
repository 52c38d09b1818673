"""What a person looks at before training: a row with supervised tokens coloured, and checks of masks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.text import Text
from transformers import PreTrainedTokenizerBase

from specdraft.data.chat import TokenRow

SUPERVISED_STYLE = "bold green"
CONTEXT_STYLE = "dim"


@dataclass(frozen=True)
class Check:
    """One finding. verdict: ``ok``, ``warning`` or ``fault``."""

    name: str
    verdict: str
    detail: str


def render_preview(row: TokenRow, tokenizer: PreTrainedTokenizerBase) -> Text:
    """The row as text with special tokens visible; supervised tokens in bold green, the rest dim."""
    text = Text()
    for supervised, group in groupby(zip(row.input_ids, row.loss_mask, strict=True), key=lambda pair: pair[1]):
        # Runs are decoded as a whole: a character can consist of several tokens.
        piece = tokenizer.decode([token for token, _ in group], skip_special_tokens=False)
        text.append(str(piece), style=SUPERVISED_STYLE if supervised else CONTEXT_STYLE)
    return text


def mask_report(rows: Sequence[TokenRow], tokenizer: PreTrainedTokenizerBase, end_ids: Collection[int]) -> list[Check]:
    """Checks of rendered rows: the supervised share, BOS at the start, and the end of turn.

    ``end_ids``: the target's EOS ids and the template's end-of-turn token.
    """
    return [_share_check(rows), _bos_check(rows, tokenizer), _end_check(rows, tokenizer, end_ids)]


def _share_check(rows: Sequence[TokenRow]) -> Check:
    tokens = sum(len(row.input_ids) for row in rows)
    supervised = sum(sum(row.loss_mask) for row in rows)
    empty = sum(not any(row.loss_mask) for row in rows)
    share = supervised / tokens if tokens else 0.0
    detail = f"{supervised} of {tokens} tokens ({share:.1%}) in {len(rows)} rows"
    if not supervised:
        return Check("supervised share", "fault", f"{detail}: nothing would be learned")
    if empty:
        return Check("supervised share", "fault", f"{detail}; {empty} rows have none")
    if share == 1.0:
        return Check("supervised share", "fault", f"{detail}: prompts are supervised too")
    return Check("supervised share", "ok", detail)


def _bos_check(rows: Sequence[TokenRow], tokenizer: PreTrainedTokenizerBase) -> Check:
    bos = tokenizer.bos_token_id
    if bos is None:
        return Check("BOS", "ok", "the tokenizer has none")
    doubled = sum(row.input_ids[:2] == [bos, bos] for row in rows)
    leading = sum(row.input_ids[:1] == [bos] for row in rows)
    if doubled:
        return Check("BOS", "fault", f"{doubled} of {len(rows)} rows begin with two {tokenizer.bos_token}")
    if leading == len(rows):
        return Check("BOS", "ok", f"every row begins with exactly one {tokenizer.bos_token}")
    # A tokenizer that puts BOS before plain text belongs to a target that was trained with it.
    expected = tokenizer("a")["input_ids"][:1] == [bos]
    detail = f"{len(rows) - leading} of {len(rows)} rows begin without {tokenizer.bos_token}, as rendered"
    return Check("BOS", "warning" if expected else "ok", detail)


def _end_check(rows: Sequence[TokenRow], tokenizer: PreTrainedTokenizerBase, end_ids: Collection[int]) -> Check:
    names = ", ".join(str(tokenizer.decode([token])) for token in sorted(end_ids)) or "none known"
    ended = missed = 0
    for row in rows:
        answered = [i for i, on in enumerate(row.loss_mask) if on]
        if not answered:
            continue
        last = answered[-1]
        ended += row.input_ids[last] in end_ids
        missed += last + 1 < len(row.input_ids) and row.input_ids[last + 1] in end_ids
    detail = f"{ended} of {len(rows)} rows end in a supervised end of turn ({names})"
    if missed:
        return Check("end of turn", "fault", f"{detail}; in {missed} rows it follows the answer unsupervised")
    if not ended:
        # Short regenerated answers look the same as a template whose end of turn is no EOS of the target.
        return Check("end of turn", "warning", f"{detail}: all were cut by length, or drafts would never stop")
    if ended < len(rows):
        return Check("end of turn", "warning", f"{detail}; the others were cut by length")
    return Check("end of turn", "ok", detail)
