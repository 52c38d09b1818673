"""``doctor check=lossless``: what it measures on a tiny target, and that it finds a decoder that is not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from specdraft.cli.main import main
from specdraft.decode._sampling_config import SamplingConfig
from specdraft.decode.batch_cache import batch_masks
from specdraft.decode.engine import SpeculativeDecoder
from specdraft.decode.proposers import HeadProposer
from specdraft.doctor.verdicts import NEAR_TIE, greedy_verdict, sampling_verdict
from specdraft.eval.lossless import (
    ChiSquare,
    Difference,
    GreedyIdentity,
    check_greedy,
    check_sampling,
    greedy_texts,
)
from specdraft.heads.storage import save_head
from specdraft.targets._config import TargetConfig
from specdraft.targets.hf import HFTarget, load_target
from tests.support import make_head
from tests.tiny import tiny_models, tiny_target, tiny_tokenizer

PROMPTS = [[1, 20, 31], [1, 45, 12, 60]]


@pytest.fixture(scope="module")
def target() -> HFTarget:
    """Logits close enough together that a tiny head is accepted now and then."""
    return tiny_target("llama", initializer_range=0.12)


def decoder(target: HFTarget) -> SpeculativeDecoder:
    return SpeculativeDecoder(target, HeadProposer(make_head("medusa", target.spec, num_draft_tokens=2).eval(), target))


@pytest.mark.parametrize("together", [False, True])
def test_greedy_identity(target: HFTarget, together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = greedy_texts(target, PROMPTS, 12)
    found = check_greedy(decoder(target), PROMPTS, texts, together)
    assert (found.num_prompts, found.identical, found.differences, found.worst()) == (2, 2, [], None)
    assert found.accepted > 0
    monkeypatch.setattr("specdraft.decode.judge.accept_greedy", lambda _, tokens, __: tokens.new_tensor(1))
    wrong = check_greedy(decoder(target), PROMPTS, texts, together)
    assert wrong.identical < 2
    worst = wrong.worst()
    assert worst is not None
    assert worst.margin == max(one.margin for one in wrong.differences) >= 0


def test_differences_are_the_first_ones_with_their_margins(target: HFTarget) -> None:
    texts = greedy_texts(target, PROMPTS, 12)
    right = decoder(target).generate(PROMPTS[1], 12, ignore_eos=True, trace=True)
    changed = [texts[0], [*texts[1][:4], texts[1][4] + 1, 0, *texts[1][6:]]]
    for together in (False, True):
        found = check_greedy(decoder(target), PROMPTS, changed, together)
        assert [(one.prompt, one.place) for one in found.differences] == [(1, 4)]
        assert found.differences[0].margin == pytest.approx(right.first_margins[4], rel=1e-3)
    short = greedy_texts(target, [[5] * 250], 12)
    assert len(short[0]) == 6, "the context ends"


def test_bfloat16_tells_near_ties_from_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 a batch is added up in another order than a row: where it differs, the two best logits are close."""
    coarse = HFTarget.from_model(tiny_models["llama"]().bfloat16(), tiny_tokenizer())
    prompts = [[1, *range(3 + i, 40 + 2 * i)] for i in range(6)]
    texts = greedy_texts(coarse, prompts, 40)
    found = check_greedy(decoder(coarse), prompts, texts, together=True)
    assert all(one.margin <= NEAR_TIE["bfloat16"] for one in found.differences)
    assert greedy_verdict(found, NEAR_TIE["bfloat16"])[0] in ("ok", "warning")
    monkeypatch.setattr("specdraft.decode.batch.batch_masks", shifted_masks)
    wrong = check_greedy(decoder(coarse), prompts, texts, together=True)
    assert greedy_verdict(wrong, NEAR_TIE["bfloat16"])[0] == "fault"


def shifted_masks(*args: Any) -> Any:
    """Rows see one key too few."""
    full, sliding = batch_masks(*args)
    full[:, :, :, 0] = False
    return full, sliding


def test_laws_of_drawn_text(target: HFTarget) -> None:
    config = SamplingConfig(temperature=1.0, top_k=4, verifier="speculative_sampling")
    right = check_sampling(target, decoder(target), PROMPTS[0], config, 150)
    assert right.cells == 25
    assert right.accepted > 10
    assert right.pvalue > 0.01
    # Another temperature than the one that is tested.
    drawn = check_sampling(target, Other(target, decoder(target)), PROMPTS[0], config, 150)
    assert drawn.pvalue < 1e-6


class Other(SpeculativeDecoder):
    """Draws from all tokens whatever it is told."""

    def __init__(self, target: HFTarget, inner: SpeculativeDecoder) -> None:
        super().__init__(target, inner.proposer)

    def generate(self, *args: object, **kwargs: object) -> object:  # type: ignore[override]
        asked = kwargs["sampling"]
        assert isinstance(asked, SamplingConfig)
        return super().generate(*args, **{**kwargs, "sampling": SamplingConfig(temperature=3.0, seed=asked.seed)})  # type: ignore[arg-type]


def test_pvalues_are_those_of_the_distribution() -> None:
    from scipy.stats import chi2

    for statistic, cells in ((3.2, 5), (40.0, 12), (0.0, 2)):
        assert ChiSquare(100, 1, cells, statistic).pvalue == pytest.approx(chi2.sf(statistic, cells - 1))
    assert ChiSquare(100, 1, 1, 0.0).pvalue == 1.0
    assert ChiSquare(100, 1, 4, float("inf")).pvalue == 0.0


def test_verdicts() -> None:
    assert greedy_verdict(GreedyIdentity(3, 9, []), 0.5)[0] == "ok"
    assert greedy_verdict(GreedyIdentity(3, 0, []), 0.5)[0] == "warning"
    near = GreedyIdentity(3, 9, [Difference(1, 4, 0.02)])
    assert greedy_verdict(near, 0.5)[0] == "warning"
    assert greedy_verdict(near, 0.01)[0] == "fault"
    verdict, text = greedy_verdict(GreedyIdentity(9, 9, [Difference(i, i + 3, 1.5 - i / 10) for i in range(7)]), 0.5)
    assert verdict == "fault"
    assert "2 of 9 answers are those of transformers" in text
    assert "prompt 0 from token 3 (1.50e+00), prompt 1 from token 4 (1.40e+00)" in text
    assert "prompt 4 from token 7" in text and "prompt 5" not in text and "and 2 more" in text
    assert sampling_verdict(ChiSquare(100, 9, 8, 7.0))[0] == "ok"
    assert sampling_verdict(ChiSquare(100, 0, 8, 7.0))[0] == "warning"
    assert sampling_verdict(ChiSquare(100, 9, 8, 70.0))[0] == "fault"


def test_doctor_checks_a_trained_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    tiny_models["llama"](initializer_range=0.12).save_pretrained("target")
    tiny_tokenizer().save_pretrained("target")
    target = load_target(TargetConfig(name="target", dtype="float32"))
    save_head(make_head("medusa", target.spec, num_draft_tokens=2), "best")
    words = ["doctor", "check=lossless", "target.name=target", "target.dtype=float32", "rows=2", "samples=50"]
    assert main([*words, "trained=best", "decode.max_new_tokens=8"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"greedy\s+2 of 2 answers are those of transformers", out)
    assert re.search(r"greedy, batch of 2\s+2 of 2 answers are those of transformers", out)
    for verifier in ("speculative_sampling", "point_mass", "block"):
        assert re.search(rf"{verifier}\s+50 answers at temperature 1, top_p 0.9: chi-square", out)
    assert "fault" not in out
    assert main([*words, "head=medusa", "decode.max_new_tokens=4"]) == 0
    torch.manual_seed(0)
    for word, message in (
        ("check=all", "check: unknown, got 'all'; use setup, lossless or list"),
        ("samples=3", "samples: too few for a test, got 3; use at least 50"),
    ):
        capsys.readouterr()
        assert main([*words, word]) == 2
        assert message in capsys.readouterr().err
    assert main(["doctor", "trained=best"]) == 2
    assert "trained: has no effect with check=setup, got best; set check=lossless" in capsys.readouterr().err
