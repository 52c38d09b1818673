"""Medusa-2: a LoRA adapter on the target that is trained with the head, from the first step to the report."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from specdraft.cli.main import main
from specdraft.core.errors import CheckpointError, ConfigError
from specdraft.core.types import FeatureRequest, TokenBatch
from specdraft.data.batching import collate
from specdraft.data.features import FeatureMemory
from specdraft.eval.drift import drift, drift_line
from specdraft.eval.summary import Bootstrap
from specdraft.heads.storage import ADAPTER_NAME, read_adapter
from specdraft.losses.alignment import build_draft_batch
from specdraft.targets._config import AdapterConfig, TargetConfig
from specdraft.targets.hf import HFTarget, load_target
from specdraft.targets.lora import LoraAdapter, check_peft, merge
from specdraft.train.inputs import TrainInputs
from specdraft.train.joint import Joint, check_processes
from specdraft.train.loop import train
from tests.cli import experiment_words, make_workspace, target_words
from tests.tiny import tiny_target
from tests.training import make_head, make_rows, make_run, reset_accelerator

pytest.importorskip("peft", reason="adapters are trained through peft, which is not installed")

Captured = pytest.CaptureFixture[str]
LORA = AdapterConfig(rank=4, alpha=8.0)


@pytest.fixture
def target() -> HFTarget:
    """One of its own: the adapter changes it in place."""
    return tiny_target("llama")


def some_tokens() -> TokenBatch:
    return collate(make_rows(4), pad_id=0)


def states(target: HFTarget, tokens: TokenBatch) -> Tensor:
    hidden = target.capture(tokens, FeatureRequest()).last_hidden
    return hidden[tokens.attention_mask]


def perturbed(target: HFTarget, config: AdapterConfig = LORA, size: float = 0.05) -> LoraAdapter:
    """An adapter that does something."""
    torch.manual_seed(3)
    adapter = LoraAdapter(target, config)
    for parameter in adapter.parameters.values():
        torch.nn.init.normal_(parameter.data, std=size)
    return adapter


def test_an_adapter_starts_as_nothing_and_can_be_put_off(target: HFTarget) -> None:
    tokens = some_tokens()
    before = states(target, tokens)
    adapter = LoraAdapter(target, LORA)
    assert torch.equal(states(target, tokens), before)
    assert {value.dtype for value in adapter.parameters.values()} == {torch.float32}
    assert sum(p.requires_grad for p in target.model.parameters()) == len(adapter.parameters)
    for parameter in adapter.parameters.values():
        torch.nn.init.normal_(parameter.data, std=0.05)
    assert (states(target, tokens) - before).abs().max() > 1e-2
    with adapter.off():
        assert torch.equal(states(target, tokens), before)
    assert all(parameter.requires_grad for parameter in adapter.parameters.values())


def test_merged_is_what_was_trained(target: HFTarget) -> None:
    tokens = some_tokens()
    adapter = perturbed(target)
    other = tiny_target("llama")
    merge(other, adapter.weights)
    torch.testing.assert_close(states(other, tokens), states(target, tokens), rtol=1e-4, atol=1e-5)
    assert other.adapted and not target.adapted
    assert other.spec == target.spec, "heads still know it"
    torch.testing.assert_close(
        other.logits(states(other, tokens)), other.unembedding(states(other, tokens)), rtol=1e-4, atol=1e-5
    )


def test_modules_are_chosen_by_name(target: HFTarget) -> None:
    adapter = LoraAdapter(target, replace(LORA, modules=["q_proj", "down_proj"]))
    names = {name.split(".lora_")[0].rpartition(".")[2] for name in adapter.parameters}
    assert names == {"q_proj", "down_proj"}
    with pytest.raises(
        ConfigError, match=r"adapter\.modules: no linear layer .* got \['lm_head'\]; use some of down_proj, "
    ):
        LoraAdapter(tiny_target("llama"), replace(LORA, modules=["lm_head"]))


def test_an_adapter_of_another_target_is_refused(target: HFTarget) -> None:
    weights = perturbed(tiny_target("llama", intermediate_size=64)).weights
    with pytest.raises(CheckpointError, match=r"its adapter is for another target, got .* of shape"):
        merge(target, weights)
    renamed = replace(weights, tensors={f"x.{name}": value for name, value in weights.tensors.items()})
    with pytest.raises(CheckpointError, match=r"its adapter is for another target, got one without x\.model"):
        merge(target, renamed)


def test_the_distance_is_the_kl_to_the_original_and_reaches_every_matrix(target: HFTarget) -> None:
    tokens = some_tokens()
    joint = Joint(target, replace(LORA, head_share=0.0))
    for parameter in joint.parameters:
        torch.nn.init.normal_(parameter.data, std=0.05)
    joint.begin(0.5, [tokens])
    memory = FeatureMemory(target, FeatureRequest(), 0)
    batch = build_draft_batch(tokens, joint.capture(tokens, memory))
    found = joint.distance(tokens, batch)
    with joint.adapter.off():
        original = target.capture(tokens, FeatureRequest()).last_hidden.flatten(0, 1)
    places = batch.anchors + 1
    p = target.unembedding(original[places]).log_softmax(-1)
    adapted = batch.features.last_hidden.flatten(0, 1)[places]
    q = target.unembedding(adapted).log_softmax(-1)
    eager = (p.exp() * (p - q)).sum()
    torch.testing.assert_close(found, eager, rtol=1e-4, atol=1e-5)
    gradients = torch.autograd.grad(found, joint.parameters, retain_graph=True)
    expected = torch.autograd.grad(eager, joint.parameters)
    assert all(gradient.abs().sum() > 0 for gradient in gradients)
    for mine, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)
    batch = build_draft_batch(tokens, joint.capture(tokens, memory))
    head = make_head("medusa")
    head_loss = sum(step.hidden.pow(2).mean() for step in head(batch, target.embed, target.unembedding))
    assert all(g.abs().sum() > 0 for g in torch.autograd.grad(head_loss, joint.parameters)), "so does the head's loss"


def test_the_weight_of_the_head_grows_after_the_head_was_alone(target: HFTarget) -> None:
    joint = Joint(target, replace(LORA, head_share=0.25, warmup_share=0.5, head_weight=0.2))
    weights = []
    for progress in (0.0, 0.24, 0.25, 0.5, 0.75, 1.0):
        joint.begin(progress, [])
        weights.append(joint.head_weight)
    assert weights[:2] == [None, None]
    assert weights[2:] == pytest.approx([0.002, 0.1, 0.2, 0.2])


def joint_run(folder: Path, resume: str = "never", **trainer: Any) -> TrainInputs:
    """Twelve steps, of which the head has the first half alone."""
    run = make_run(folder, trainer=trainer, resume=resume)
    own = tiny_target("llama")
    torch.manual_seed(5)
    joint = Joint(own, replace(LORA, head_share=0.5, head_lr_multiple=4.0))
    return replace(run, target=own, joint=joint)


def test_two_stages_in_one_run(tmp_path: Path) -> None:
    whole = joint_run(tmp_path / "whole")
    start = {name: value.detach().clone() for name, value in whole.joint.adapter.parameters.items()}
    train(whole)
    lines = [json.loads(line) for line in (tmp_path / "whole/metrics.jsonl").read_text().splitlines()]
    assert ["target_kl" in line for line in lines] == [False] * 6 + [True] * 6
    assert lines[6]["target_kl"] == pytest.approx(0.0, abs=1e-6), "the adapter joins as nothing"
    assert lines[-1]["target_kl"] > 0
    moved = {
        name: value for name, value in whole.joint.adapter.parameters.items() if not torch.equal(value, start[name])
    }
    assert moved, "the adapter learns"
    saved = load_file(tmp_path / "whole/best" / ADAPTER_NAME)
    assert all(torch.equal(saved[name], value) for name, value in whole.joint.adapter.parameters.items())
    assert json.loads((tmp_path / "whole/best/config.json").read_text())["adapter"] == {
        "scale": 2.0,
        "num_parameters": sum(value.numel() for value in saved.values()),
    }


def test_the_head_learns_faster_than_the_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = joint_run(tmp_path)
    rates: list[list[float]] = []
    step = torch.optim.AdamW.step

    def spy(self: Any, *args: Any, **kwargs: Any) -> Any:
        rates.append([group["lr"] for group in self.param_groups])
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", spy)
    train(run)
    assert rates and all(group[-1] == pytest.approx(group[0] / 4) for group in rates)


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    straight = joint_run(tmp_path / "straight", save_every=4)
    train(straight)
    folder = tmp_path / "halves"
    half = joint_run(folder, save_every=8, keep_checkpoints=3)
    train(half)
    for path in (folder / "checkpoints").glob("step-000012"):
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    rest = joint_run(folder, resume="auto", save_every=8)
    assert train(rest).state.step == 12
    for name, value in straight.joint.adapter.parameters.items():
        assert torch.equal(value, rest.joint.adapter.parameters[name])
    for name, value in straight.head.state_dict().items():
        assert torch.equal(value, rest.head.state_dict()[name])
    with pytest.raises(CheckpointError, match="resume: adapter_rank differs from the checkpoint's 4, got None"):
        train(make_run(folder, resume="must"))


def test_drift_of_nothing_and_of_something(target: HFTarget) -> None:
    other = tiny_target("llama")
    prompts = [[5, 6, 7, 8], [9, 10, 11]]
    none = drift(target, other, prompts, 8, Bootstrap(100, 0))
    assert none["kl"]["value"] == pytest.approx(0.0, abs=1e-6)
    assert (none["same_choice"], none["num_prompts"]) == (1.0, 2)
    merge(other, perturbed(tiny_target("llama"), size=0.2).weights)
    some = drift(target, other, prompts, 8, Bootstrap(100, 0))
    assert some["kl"]["value"] > 0.05
    assert some["num_tokens"] == none["num_tokens"] > 8
    assert some["same_choice"] < 1.0
    assert "lossy with respect to the original" in drift_line(some)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("medusa2"))


@pytest.fixture(scope="module")
def head(workspace: Path) -> Path:
    """A head trained with its adapter by the command line."""
    reset_accelerator()
    words = ["head=medusa", "head.num_draft_tokens=2", "adapter=lora", "adapter.rank=4", "adapter.head_share=0.0"]
    more = ["optim.lr=0.5", "trainer.epochs=2", f"output_dir={workspace / 'outputs'}"]
    assert main(["train", "name=two", *experiment_words(workspace), *words, *more]) == 0
    return workspace / "outputs/two/best"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    reset_accelerator()
    return tmp_path


def test_eval_measures_both_and_says_so(workspace: Path, head: Path, here: Path, capsys: Captured) -> None:
    words = [*target_words(workspace)[1:], f"prompts={workspace / 'asked.jsonl'}", "eval.limit=3"]
    call = ["eval", f"head={head}", "decode.max_new_tokens=12", "eval.bootstrap_samples=100", "output=out.json"]
    assert main([*call, *words]) == 0
    out = capsys.readouterr().out
    results = json.loads(Path("out.json").read_text())
    assert results["target"]["adapted"] is True
    assert results["drift"]["num_prompts"] == 3
    assert results["drift"]["kl"]["value"] > 0
    assert results["sets"]["asked"]["identical_outputs"] == 3, "lossless for the adapted target"
    assert "medusa (adapted target, lossy) on" in out
    assert "the target is no longer the original" in out
    assert "lossy with respect to the original" in out
    adapter = read_adapter(head)
    config = TargetConfig(name=str(workspace / "target"), device="cpu", pack_weights=False)
    first, second = load_target(config), load_target(config, adapter)
    tokens = some_tokens()
    assert (states(first, tokens) - states(second, tokens)).abs().max() > 1e-4


def test_packed_weights_have_the_adapter_too(workspace: Path, head: Path) -> None:
    config = TargetConfig(name=str(workspace / "target"), device="cpu", pack_weights=True)
    plain = load_target(replace(config, pack_weights=False), read_adapter(head))
    packed = load_target(config, read_adapter(head))
    tokens = some_tokens()
    torch.testing.assert_close(states(packed, tokens), states(plain, tokens), rtol=1e-4, atol=1e-4)


def test_other_commands_say_it_or_refuse(workspace: Path, head: Path, here: Path, capsys: Captured) -> None:
    words = target_words(workspace)
    assert main(["generate", f"head={head}", "prompt=Hello", "decode.max_new_tokens=6", *words[1:]]) == 0
    assert "lossy with respect to the original" in capsys.readouterr().err
    doctor = ["doctor", "check=lossless", f"trained={head}", "rows=2", "samples=50", "decode.max_new_tokens=8", *words]
    main([*doctor, f"eval.prompts=[{workspace / 'asked.jsonl'}]"])
    out = " ".join(capsys.readouterr().out.split())
    assert "warning target" in out
    assert "lossy with respect to the original" in out
    assert main(["export", f"head={head}", "output=exported"]) == 2
    assert "head: drafts for a target with an adapter merged in" in capsys.readouterr().err
    assert main(["eval", f"heads=[{head}]", *words[1:]]) == 2
    assert "heads: a head with an adapter changes the target of all" in capsys.readouterr().err
    assert main(["train", "name=x", "head=medusa", f"trainer.warm_start={head}", *words]) == 2
    assert "trainer.warm_start: the head was trained with a target of its own" in capsys.readouterr().err
    assert not (here / "exported").exists()


def test_a_missing_adapter_is_one_line(head: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((head / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"head: adapter\.safetensors is missing or torn"):
        read_adapter(tmp_path)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            ["head=eagle3", "adapter=lora"],
            "adapter.rank: heads of kind eagle3 are trained for the target as it is, got 32",
        ),
        (["head=medusa", "adapter=lora", "adapter.rank=0"], "adapter.rank: must be at least 1 or null, got 0"),
        (
            ["head=medusa", "adapter.alpha=2.0"],
            "adapter.alpha: has no effect without adapter.rank, got 2.0; add adapter=lora",
        ),
        (["head=medusa", "adapter=lora", "adapter.modules=[]"], "adapter.modules: must name layers, each once, got []"),
        (["head=medusa", "adapter=lora", "adapter.head_weight=0.0"], "adapter.head_weight: must be positive, got 0.0"),
        (
            ["head=medusa", "adapter=lora", "adapter.head_share=1.0"],
            "adapter.head_share: leaves nothing for the adapter",
        ),
        (
            ["head=medusa", "adapter=lora", "adapter.warmup_share=2.0"],
            "adapter.warmup_share: must lie in 0..1, got 2.0",
        ),
        (
            ["head=medusa", "adapter=lora", "trainer.feature_memory_gib=1.0"],
            "trainer.feature_memory_gib: the features change",
        ),
        (["head=medusa", "adapter=lora", "trainer.ema_decay=0.9"], "trainer.ema_decay: the adapter is not averaged"),
        (["head=medusa", "adapter=lora", "optim=muon"], "optim.optimizer: the adapter takes adamw, got muon"),
        (
            ["head=medusa", "adapter=lora", "target.quantization=int8"],
            "adapter.rank: needs a target with plain weights",
        ),
    ],
)
def test_a_mistake_is_one_line_before_anything_loads(
    bad: list[str], message: str, here: Path, capsys: Captured
) -> None:
    assert main(["train", "name=x", "target.name=nowhere/", *bad]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert list(here.iterdir()) == []


def test_what_an_adapter_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    check_peft(LORA)
    check_processes(1)
    with pytest.raises(ConfigError, match=r"adapter\.rank: is trained in one process, got 2 processes"):
        check_processes(2)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_peft(AdapterConfig())
    with pytest.raises(ConfigError, match=r"adapter\.rank: needs the package peft, got 4 without it"):
        check_peft(LORA)
