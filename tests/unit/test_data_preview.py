"""The coloured row and the checks that doctor prints."""

from __future__ import annotations

import re

import pytest

from specdraft.data.chat import ChatRenderer, TokenRow
from specdraft.data.preview import SUPERVISED_STYLE, mask_report, render_preview
from tests.unit import data_helpers as h

TOKENIZER = h.chat_tokenizer(h.LLAMA3, "<|eot|>")
RENDERER = ChatRenderer(TOKENIZER)
ROW = RENDERER.row(h.talk("hello", "grüße ✓", "b", "c"))
END = RENDERER.end_of_turn_ids


def verdicts(*rows: TokenRow) -> dict[str, str]:
    return {check.name: check.verdict for check in mask_report(rows, TOKENIZER, END)}


def test_supervised_tokens_are_coloured() -> None:
    text = render_preview(ROW, TOKENIZER)
    assert text.plain == TOKENIZER.decode(ROW.input_ids, skip_special_tokens=False)
    coloured = [text.plain[span.start : span.end] for span in text.spans if span.style == SUPERVISED_STYLE]
    assert coloured == ["grüße ✓<|eot|>", "c<|eot|>"]


def test_a_good_row_has_no_findings() -> None:
    assert verdicts(ROW) == {"supervised share": "ok", "BOS": "ok", "end of turn": "ok"}
    share = mask_report([ROW], TOKENIZER, END)[0]
    assert f"{sum(ROW.loss_mask)} of {len(ROW.input_ids)} tokens" in share.detail


@pytest.mark.parametrize("supervised", [True, False])
def test_masks_of_all_or_nothing_are_faults(supervised: bool) -> None:
    assert verdicts(TokenRow(ROW.input_ids, [supervised] * len(ROW.input_ids)))["supervised share"] == "fault"


def test_one_row_without_supervision_is_a_fault() -> None:
    empty = TokenRow(ROW.input_ids, [False] * len(ROW.input_ids))
    assert verdicts(ROW, empty)["supervised share"] == "fault"


def test_bos_doubled_or_missing() -> None:
    ids, mask = ROW.input_ids, ROW.loss_mask
    assert verdicts(TokenRow([ids[0], *ids], [False, *mask]))["BOS"] == "fault"
    assert verdicts(TokenRow(ids[1:], mask[1:]))["BOS"] == "warning"


def test_an_unsupervised_end_of_turn_is_a_fault() -> None:
    mask = [on and token not in END for token, on in zip(ROW.input_ids, ROW.loss_mask, strict=True)]
    assert verdicts(TokenRow(ROW.input_ids, mask))["end of turn"] == "fault"


def test_answers_without_end_are_pointed_out() -> None:
    cut = TokenRow(ROW.input_ids[:-1], ROW.loss_mask[:-1])
    for rows, detail in (((cut,), "drafts would never stop"), ((cut, ROW), "1 of 2 rows end .* others were cut")):
        check = mask_report(rows, TOKENIZER, END)[-1]
        assert check.verdict == "warning"
        assert re.search(detail, check.detail)
