from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from specdraft.targets import packing
from specdraft.targets.packing import pack_linears
from tests.tiny import tiny_models, tiny_target

ROWS = (1, 2, 3, 7, 8, 16, 17, 64, 65, 256, 257)


@pytest.fixture(params=["intel", "amd"], autouse=True)
def processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both choices of kernels are right on every machine; they differ in speed only."""
    monkeypatch.setattr(packing, "_is_amd", lambda: request.param == "amd")
    name: str = request.param
    return name


def frozen_linear(dtype: torch.dtype, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 24, bias=bias)).to(dtype).requires_grad_(False)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_packed_layer_equals_plain_at_every_number_of_rows(dtype: torch.dtype, bias: bool) -> None:
    model = frozen_linear(dtype, bias)
    linear = model[0]
    with pack_linears(model) as packed, torch.no_grad():
        assert len(packed) == (dtype in packing._kernels())
        for rows in ROWS:
            x = torch.randn(1, rows, 40, dtype=dtype)
            wanted = F.linear(x, linear.weight, linear.bias)
            assert model(x).shape == (1, rows, 24)
            torch.testing.assert_close(model(x), wanted, rtol=2e-2 if dtype != torch.float32 else 1e-5, atol=2e-2)
    assert "forward" not in linear.__dict__


def count_products(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every product that a packed kernel computes in ``model``, which must be packed already."""
    calls: list[int] = []
    for module in model.modules():
        forward = module.__dict__.get("forward")
        if forward is not None:
            product = forward.product
            monkeypatch.setattr(
                forward, "product", lambda x, w, b, rows, p=product: (calls.append(rows), p(x, w, b, rows))[1]
            )
    return calls


@pytest.mark.skipif(torch.float32 not in packing._kernels(), reason="this torch has no packed fp32 kernel")
def test_packed_kernel_runs_only_without_gradients_and_for_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = packing._kernels()[torch.float32]
    model = frozen_linear(torch.float32)
    pack_linears(model)
    calls = count_products(model, monkeypatch)
    x = torch.randn(4, 40, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None
    assert calls == []
    with torch.no_grad():
        model(torch.randn(kernel.max_rows + 1, 40))
        model(torch.randn(kernel.min_rows - 1, 40))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert model(torch.randn(4, 40)).dtype == torch.bfloat16
        assert calls == []
        model(torch.randn(2, 4, 40))
        model(torch.randn(kernel.min_rows, 40))
        model(torch.randn(kernel.max_rows, 40))
    assert calls == [8, kernel.min_rows, kernel.max_rows]


@pytest.mark.skipif(not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this torch has no oneDNN")
def test_the_fp32_kernel_is_the_processors(processor: str) -> None:
    """Single rows are packed where the plain product is slow at them."""
    kernel = packing._kernels()[torch.float32]
    assert (kernel.pack is packing._pack_onednn, kernel.min_rows) == ((True, 1) if processor == "amd" else (False, 4))


@pytest.mark.skipif(torch.float32 not in packing._kernels(), reason="this torch has no packed fp32 kernel")
def test_a_weight_that_changed_is_not_multiplied_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = frozen_linear(torch.float32)
    x = torch.randn(4, 40)
    pack_linears(model)
    model.load_state_dict({name: tensor + 1.0 for name, tensor in model.state_dict().items()})
    with torch.no_grad():
        torch.testing.assert_close(model(x), F.linear(x, model[0].weight, model[0].bias))
        assert len(pack_linears(model)) == 1
        assert len(pack_linears(model)) == 0
        calls = count_products(model, monkeypatch)
        torch.testing.assert_close(model(x), F.linear(x, model[0].weight, model[0].bias))
    assert calls == [4]
    with torch.inference_mode():
        made = frozen_linear(torch.float32)
        assert len(pack_linears(made)) == 1
        torch.testing.assert_close(made(x), F.linear(x, made[0].weight, made[0].bias))


def test_trainable_and_other_modules_are_left_alone() -> None:
    class Other(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(4, 4), Other(4, 4).requires_grad_(False), nn.Embedding(4, 4))
    assert len(pack_linears(model)) == 0


def test_no_kernel_leaves_the_model_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    model = frozen_linear(torch.float32)
    assert len(pack_linears(model)) == 0
    assert "forward" not in model[0].__dict__


def test_a_kernel_that_computes_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = packing._Kernel(lambda w: lambda x, weight, bias, rows: F.linear(x, weight, bias) * 1.01, 1, 4)
    assert not packing._is_right(torch.float32, kernel)
    right = packing._Kernel(lambda w: lambda x, weight, bias, rows: F.linear(x, weight, bias), 1, 4)
    assert packing._is_right(torch.float32, right)


def test_packed_target_gives_the_same_logits_and_covers_the_lm_head(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("gpt_neox")
    plain = copy.deepcopy(target.model)
    target.pack()
    assert target.packed is not None
    assert len(target.packed) == sum(type(m) is nn.Linear for m in plain.modules())
    calls = count_products(target.model, monkeypatch)
    ids = torch.arange(5)[None]
    hidden = target.layout.decoder(input_ids=ids).last_hidden_state.detach()
    with torch.no_grad():
        logits = target.logits(target.layout.decoder(input_ids=ids).last_hidden_state)
        torch.testing.assert_close(logits, plain(input_ids=ids).logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(target.unembedding(hidden), logits, rtol=1e-4, atol=1e-4)
    assert calls.count(5) == len(target.packed)


def test_state_dict_is_unchanged_by_packing() -> None:
    model = tiny_models["qwen2"]().requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pack_linears(model):
        after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
