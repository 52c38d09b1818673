"""A target whose layers are spread over the processes of a launch with FSDP 2, each of which gathers one at a time."""

from __future__ import annotations

import gc
import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import debug
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from specdraft.core.errors import ConfigError, SpecDraftError, UnsupportedTargetError
from specdraft.core.types import LayerWeights, TargetSpec
from specdraft.targets._config import TargetConfig
from specdraft.targets.check import check_target
from specdraft.targets.hf import HFTarget, eos_token_ids
from specdraft.targets.layout import Layout, find_layout, text_config
from specdraft.targets.loading import load_config, load_model, load_tokenizer, resolve_source
from specdraft.targets.spec import target_spec
from specdraft.train.state import on_main

Slots = list[tuple[dict[str, Any], str]]
"""Where one tensor of a model stands: dictionaries of modules, and its key in each. Tied weights stand in several."""


@cache
def asks_to_shard() -> bool:
    """Whether the launch is one with FSDP 2: then the target is sharded. The head is small, and whole in every process.

    Accelerate and transformers would act on such a launch, too; what they read of it is taken out of the environment.

    Raises:
        ConfigError: a launch with FSDP 1, with settings of FSDP that have no effect here, or with DeepSpeed.
    """
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        raise ConfigError(
            "accelerate: what is trained is small, and what is large is not trained, got a launch with DeepSpeed; use "
            "--config_file configs/accelerate/fsdp2.yaml, which shards the target, or configs/accelerate/ddp.yaml"
        )
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return False
    wanted = {"FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true", "FSDP_OFFLOAD_PARAMS": "false"}
    for name, value in wanted.items():
        found = os.environ.get(name, value).lower()
        if found != value:
            raise ConfigError(
                f"accelerate: a launch with FSDP needs {name.lower()}: {value}, got {found}; use --config_file "
                "configs/accelerate/fsdp2.yaml"
            )
    if "ignored_params" not in inspect.signature(fully_shard).parameters:
        raise ConfigError(
            f"accelerate: FSDP needs a newer torch, got {torch.__version__}; upgrade it, or use --config_file "
            "configs/accelerate/ddp.yaml"
        )
    del os.environ["ACCELERATE_USE_FSDP"]
    return True


def refuse_to_shard(what: str, instead: str) -> None:
    """Raises ConfigError in a launch of several processes with FSDP, for a command that needs the whole target."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and asks_to_shard():
        raise ConfigError(f"accelerate: {what} takes the whole target, got a launch with FSDP; {instead}")


def check_shardable(config: TargetConfig) -> None:
    """Raises ConfigError where the settings of the target do not go with a launch that shards it."""
    for name, plain in (("quantization", "none"), ("device_map", None), ("compile", False)):
        value = getattr(config, name)
        if value != plain:
            raise ConfigError(
                f"target.{name}: does not go with a launch that shards the target (FSDP), got {value}; use "
                f"{'null' if plain is None else str(plain).lower()}"
            )


class ShardedTarget(HFTarget):
    """A target of whose layers every process holds a part; a forward gathers the weights layer by layer, and frees them.

    Embedding, final norm and lm_head are whole everywhere. All processes make every forward together, each with its own
    tokens; inside ``together`` each may make another number of them.
    """

    def __init__(
        self, model: PreTrainedModel, layout: Layout, spec: TargetSpec, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> None:
        """Shards the layers of ``model``, which is whole, and the same in every process, unless they are so already."""
        super().__init__(model, layout, spec, tokenizer)
        mesh = _mesh(self.device)
        for layer in layout.layers:
            if not isinstance(layer, FSDPModule):
                fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        inside = {id(parameter) for parameter in layout.layers.parameters()}
        whole = {parameter for parameter in layout.decoder.parameters() if id(parameter) not in inside}
        # As the root it lets the layers gather ahead of each other; it shards nothing itself.
        fully_shard(layout.decoder, mesh=mesh, reshard_after_forward=True, ignored_params=whole)
        self._apart = False
        layout.decoder.register_forward_pre_hook(self._announce, prepend=True)

    def last_layer(self) -> LayerWeights | None:
        """See ``HFTarget``; copies, whole in every process. All processes call it."""
        layer = cast(FSDPModule, self.layout.layers[-1])
        layer.unshard()
        try:
            found = super().last_layer()
            if found is None:
                return None
            return LayerWeights(*(getattr(found, field.name).clone() for field in fields(found)))
        finally:
            layer.reshard()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Inside, processes may make different numbers of forwards: one that is done takes part in those of the others.

        All processes enter and leave it in the same order, and wait for each other in no other way inside. Costs one
        exchange of a number per forward.
        """
        self._apart = True
        try:
            yield
        except SpecDraftError:
            self._serve()
            raise
        else:
            self._serve()
        finally:  # after another error this process ends, and the launcher ends the others
            self._apart = False

    def _announce(self, _module: nn.Module, _args: Any) -> None:
        """Before a forward: the processes that are done hear of it."""
        if self._apart:
            self._any(True)

    def _any(self, goes_on: bool) -> bool:
        """Whether any process says yes; called by all."""
        flag = torch.tensor([goes_on], dtype=torch.int32, device=self.device)
        distributed.all_reduce(flag, op=distributed.ReduceOp.MAX)
        return bool(flag)

    @torch.no_grad()
    def _serve(self) -> None:
        """Takes part in the forwards of the other processes until none has any to make."""
        self._apart = False
        nothing = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        while self._any(False):
            self.layout.decoder(input_ids=nothing, use_cache=False)


def load_sharded(config: TargetConfig, accelerator: Accelerator) -> ShardedTarget:
    """The target of ``config``, frozen, checked, and sharded over the processes of the launch, all of which call it.

    The first process reads it into the memory of its host; a device holds one whole layer at a time.

    Raises:
        ConfigError, CheckpointError, UnsupportedTargetError: see ``load_target``.
    """
    check_shardable(config)
    source = resolve_source(config)
    model_config, tokenizer = load_config(config, source), load_tokenizer(config)
    read: list[PreTrainedModel] = []

    def load() -> tuple[TargetSpec, str, dict[str, tuple[torch.Size, torch.dtype]]]:
        model = load_model(config, source, model_config, torch.device("cpu"))
        read.append(model)
        revision = getattr(model.config, "_commit_hash", None) or config.revision
        spec = target_spec(model, find_layout(model), config.name, revision, eos_token_ids(model, tokenizer))
        table = {name: (_held(slots).shape, _held(slots).dtype) for name, slots in _tensors(model).items()}
        return spec, str(text_config(model.config)._attn_implementation), table

    spec, attention, table = on_main(accelerator, load)
    if not read:
        with torch.device("meta"):
            make = cast(Any, AutoModelForCausalLM).from_config
            read.append(
                make(
                    model_config,
                    dtype=getattr(torch, config.dtype),
                    attn_implementation=attention,
                    trust_remote_code=config.trust_remote_code,
                )
            )
    model = read.pop()
    found = {name: _held(slots).shape for name, slots in _tensors(model).items()}
    if not all(gather_object([found == {name: shape for name, (shape, _) in table.items()}])):
        raise UnsupportedTargetError(
            f"target.name: has other weights when loaded than its settings say, so that it cannot be sharded, got "
            f"{config.name!r}; use --config_file configs/accelerate/ddp.yaml"
        )
    layout = _spread(model, table, accelerator)
    target = ShardedTarget(model, layout, spec, tokenizer)
    check_target(target)
    return target


def end_processes() -> None:
    """Leaves the process group of a launch, and ends its threads; the last thing that a process of several does.

    A thread of gloo that is still giving back the tensors of a message when Python shuts down aborts the process, and
    a launch that has done its work would end with an error. The group ends its threads when nothing refers to it any
    more, so whoever calls this has let go of target and head; what torch keeps of sharded tensors is dropped here.
    """
    if distributed.is_initialized():
        distributed.destroy_process_group()
    clear = getattr(debug, "_clear_sharding_prop_cache", None)  # private: where it is missing, the threads stay
    if clear is not None:
        clear()
    gc.collect()


def _mesh(device: torch.device) -> DeviceMesh:
    """All processes of the launch in a row."""
    return init_device_mesh(device.type, (distributed.get_world_size(),))


@torch.no_grad()
def _spread(
    model: PreTrainedModel, table: dict[str, tuple[torch.Size, torch.dtype]], accelerator: Accelerator
) -> Layout:
    """Gives every process the values of the first one, on its device; of the layers only its part stays."""
    layout = find_layout(model)
    inside = {id(tensor) for tensor in (*layout.layers.parameters(), *layout.layers.buffers())}
    slots = _tensors(model)
    names = {id(_held(own)): name for name, own in slots.items()}
    rest = [name for key, name in names.items() if key not in inside]
    by_layer = [[names[id(t)] for t in (*layer.parameters(), *layer.buffers())] for layer in layout.layers]
    placed: set[str] = set()
    for group, layer in zip([*by_layer, rest], [*layout.layers, None], strict=True):
        for name in group:
            if name not in placed:
                _place(slots[name], table[name], accelerator)
                placed.add(name)
        if layer is not None:
            fully_shard(layer, mesh=_mesh(accelerator.device), reshard_after_forward=True)
    return layout


def _place(slots: Slots, kind: tuple[torch.Size, torch.dtype], accelerator: Accelerator) -> None:
    """Puts the first process's values of one tensor in all its places, in every process."""
    value, (shape, dtype) = _held(slots), kind
    if accelerator.is_main_process:
        real = value.detach().to(accelerator.device).contiguous()
    else:
        real = torch.empty(shape, dtype=dtype, device=accelerator.device)
    # As bytes: not every backend sends every dtype.
    distributed.broadcast(real.view(-1).view(torch.uint8), src=0)
    placed = nn.Parameter(real, requires_grad=False) if isinstance(value, nn.Parameter) else real
    for holder, name in slots:
        holder[name] = placed


def _tensors(model: nn.Module) -> dict[str, Slots]:
    """Every parameter and buffer of ``model`` by its first name."""
    found: dict[int, tuple[str, Slots]] = {}
    for prefix, module in model.named_modules():
        for holder in (module._parameters, module._buffers):
            for name, value in holder.items():
                if value is not None:
                    found.setdefault(id(value), (f"{prefix}.{name}", []))[1].append((holder, name))
    return dict(found.values())


def _held(slots: Slots) -> Tensor:
    holder, name = slots[0]
    return cast(Tensor, holder[name])
