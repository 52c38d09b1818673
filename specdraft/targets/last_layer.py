"""The weights of a target's last decoder layer, for draft layers that start from them; only where it is a plain Llama layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdraft.core.types import LayerWeights
from specdraft.targets.fast_path import TOLERANCE, FastLayer, is_equal, stand_alone
from specdraft.targets.layout import Layout


@torch.no_grad()
def last_layer_weights(layout: Layout) -> LayerWeights | None:
    """The last layer and the final norm of a target, or None where a Llama-style layer does not compute the same.

    What counts is what the layer computes on random input, not its class: a layer with biases, norms of its own on
    queries and keys, other activations or other scales is none.
    """
    layer = layout.layers[-1]
    try:
        fast = layer.__dict__.get("forward") or stand_alone(layer)
        if not isinstance(fast, FastLayer) or not is_equal(fast):
            return None
        attention, mlp = layer.get_submodule("self_attn"), layer.get_submodule("mlp")
        linears = [attention.get_submodule(f"{name}_proj") for name in "qkvo"]
        linears += [mlp.get_submodule(f"{name}_proj") for name in ("gate", "up", "down")]
        norms = [
            layer.get_submodule("input_layernorm").get_parameter("weight"),
            layer.get_submodule("post_attention_layernorm").get_parameter("weight"),
            layout.final_norm.get_parameter("weight"),
        ]
    except (AttributeError, TypeError, RuntimeError):
        return None
    plain = all(type(linear) is nn.Linear and linear.bias is None for linear in linears)
    if not plain or fast.head_norm is not None or abs(fast.scale - fast.head_dim**-0.5) > 1e-6:
        return None
    x = torch.linspace(-4.0, 4.0, 64, device=norms[0].device)
    if not torch.allclose(fast.activation(x), F.silu(x), atol=1e-5) or not _is_rms_norm(layout.final_norm, norms[2]):
        return None
    return LayerWeights(*(linear.get_parameter("weight").detach() for linear in linears), *(n.detach() for n in norms))


def _is_rms_norm(norm: nn.Module, weight: Tensor) -> bool:
    """Whether the norm multiplies by its weight itself (Gemma's adds one to it)."""
    x = torch.linspace(-2.0, 3.0, 3 * weight.numel(), device=weight.device).sin().view(3, -1).to(weight.dtype)
    wanted, found = norm(x).float(), F.rms_norm(x.float(), weight.shape, weight.float(), 1e-6)
    return bool((found - wanted).norm() <= TOLERANCE.get(weight.dtype, 1e-2) * wanted.norm())
