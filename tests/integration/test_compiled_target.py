"""A compiled target decodes the same text, and its graph is what ran."""

from __future__ import annotations

import pytest
import torch

from specdraft.core import compiling
from specdraft.core.errors import ConfigError
from specdraft.core.tree import DraftTree
from specdraft.decode.engine import SpeculativeDecoder
from specdraft.targets.hf import HFTarget
from tests.decode.oracle import Oracle, greedy, prompt_ids
from tests.tiny import tiny_models, tiny_target

LENGTH = 30
TREE = DraftTree.from_paths([[0], [1], [0, 0], [1, 0], [1, 1]])


pytestmark = pytest.mark.usefixtures("own_graphs")


def count_graphs(subject: HFTarget, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every forward that goes through the graph."""
    assert subject.compiled is not None
    graph = subject.compiled._graph
    calls: list[int] = []

    def counted(caches: object, biases: object, x: torch.Tensor, *rest: object) -> object:
        calls.append(x.shape[1])
        return graph(caches, biases, x, *rest)

    monkeypatch.setattr(subject.compiled, "_graph", counted)
    return calls


@pytest.mark.parametrize("kind", ["llama", "qwen2_sliding"])
@pytest.mark.parametrize("pad", [False, True], ids=["exact", "padded"])
def test_text_and_steps_are_those_of_the_target(kind: str, pad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = HFTarget.from_model(tiny_models[kind]())
    prompt = prompt_ids(9)
    answer = greedy(subject, prompt, LENGTH + 4)
    subject.pack()
    subject.compile(pad)
    calls = count_graphs(subject, monkeypatch)
    decoder = SpeculativeDecoder(subject, Oracle(answer, TREE, 2, 1))
    result = decoder.generate(prompt, LENGTH, ignore_eos=True)
    assert result.tokens == answer[:LENGTH]
    assert result.num_steps == -(-(LENGTH - 1) // 3)
    # The prompt goes into an empty cache, without the graph.
    assert len(calls) == result.num_steps
    assert max(calls) == (8 if pad else len(TREE) + 1)


def test_rows_of_a_batch_and_a_second_text_in_the_same_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = tiny_target("llama", max_position_embeddings=512)
    # The longer row passes from the first block of columns to the second.
    prompts = [prompt_ids(3), prompt_ids(compiling.COLUMNS - 6)]
    wanted = [greedy(subject, prompt, 12) for prompt in prompts]
    subject.pack()
    subject.compile()
    calls = count_graphs(subject, monkeypatch)
    decoder = SpeculativeDecoder(subject)
    assert [result.tokens for result in decoder.generate_batch(prompts, 12, ignore_eos=True)] == wanted
    assert calls
    assert [decoder.generate(prompt, 12, ignore_eos=True).tokens for prompt in prompts] == wanted


def test_what_cannot_be_compiled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"target\.compile: the layers of"):
        tiny_target("gpt2").compile()

    def missing() -> None:
        raise compiling.InvalidCxxCompiler

    monkeypatch.setattr(compiling, "get_cpp_compiler", missing)
    with pytest.raises(ConfigError, match=r"target\.compile: needs a C\+\+ compiler"):
        tiny_target("llama").compile()
