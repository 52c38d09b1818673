"""The doctor finds each planted fault, by the check that is for it, and none in a clean run. docs/doctor.md lists them."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdraft.core.types import FeatureRequest, Features, TokenBatch
from specdraft.data._config import DataConfig
from specdraft.data._features_config import FeaturesConfig
from specdraft.data.chat import TokenRow
from specdraft.data.formats import Message
from specdraft.decode._config import DecodeConfig
from specdraft.doctor.case import Case
from specdraft.doctor.checks import resources
from specdraft.doctor.findings import Finding, all_checks
from specdraft.doctor.page import as_dict, html_page, worst_rows
from specdraft.eval._config import EvalConfig
from specdraft.export import registry
from specdraft.heads.base import DraftHead, head_config
from specdraft.heads.medusa import MedusaHead
from specdraft.losses._config import LossConfig
from specdraft.plan import probe
from specdraft.plan.job import Job
from specdraft.targets._config import TargetConfig
from specdraft.targets.hf import HFTarget, load_target
from specdraft.train._config import OptimConfig, TrainerConfig
from tests.cli import make_workspace
from tests.doctor_cases import EOS, answered, conversation, faults, run, shifted, with_rows, with_target, with_template
from tests.tiny import CHAT_TEMPLATE, tiny_target
from tests.unit import data_helpers as h

ROWS = 8


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("doctor"))


@pytest.fixture(scope="module")
def target(workspace: Path) -> HFTarget:
    return load_target(TargetConfig(name=str(workspace / "target"), device="cpu", pack_weights=False))


@pytest.fixture(scope="module")
def clean(workspace: Path, target: HFTarget, tmp_path_factory: pytest.TempPathFactory) -> Case:
    conversations = [conversation(place) for place in range(ROWS)]
    torch.manual_seed(0)
    config = head_config("medusa", {"num_draft_tokens": 2, "draft_vocab_size": 60})
    head = config.build(target.spec)
    rows = answered(target, conversations)
    used = {token for row in rows for token, on in zip(row.input_ids, row.loss_mask, strict=True) if on} | {EOS}
    head.vocab.set_tokens(sorted([*used, *(token for token in range(97) if token not in used)][:60]))
    head.init_from_target(target.embed, target.unembedding)
    job = Job(
        target=TargetConfig(name=str(workspace / "target"), device="cpu", pack_weights=False),
        head=config,
        data=DataConfig(sources=[str(workspace / "chats.jsonl")], max_length=128, max_new_tokens=25, batch_size=2),
        features=FeaturesConfig(),
        loss=LossConfig(terms={"hard_ce": 1.0}),
        optim=OptimConfig(lr=2e-2),
        trainer=TrainerConfig(mixed_precision="no", eval_prompts=2),
        decode=DecodeConfig(),
        eval=EvalConfig(prompts=[str(workspace / "asked.jsonl")]),
        folder=workspace / "run",
        data_dir=workspace / "data",
        settings={"name": "x"},
    )
    return Case(
        job=job,
        target=target,
        rows=rows,
        conversations=conversations,
        dropped={},
        head=head,
        scratch=tmp_path_factory.mktemp("scratch"),
        overfit_steps=400,
    )


@pytest.fixture(scope="module")
def clean_findings(clean: Case) -> dict[str, Finding]:
    return run(clean)


def test_a_clean_run_has_no_fault(clean_findings: dict[str, Finding]) -> None:
    assert {name: found.evidence for name, found in clean_findings.items() if found.verdict == "fault"} == {}
    assert {found.check for found in clean_findings.values()} == set(all_checks())
    assert clean_findings["overfit"].verdict == "ok"
    assert clean_findings["overfit"].numbers["acceptance_length"] > 2.5
    assert clean_findings["greedy identity"].numbers["accepted"] > 10
    assert "medusa" in clean_findings["export"].evidence
    assert all(found.fix for found in clean_findings.values() if found.verdict != "ok")


def test_every_check_says_what_it_looks_at() -> None:
    docs = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text(encoding="utf-8")
    table = docs.partition("| check | looks at |")[2].partition("\n\n")[0]
    listed = {name for row in table.splitlines() for name in re.findall(r"`([^`]+)`", row.partition(" | ")[0])}
    assert listed == set(all_checks())
    assert all(found.summary for found in all_checks().values())


class TestMasks:
    def test_nothing_supervised(self, clean: Case) -> None:
        empty = with_rows(clean, lambda row: TokenRow(row.input_ids, [False] * len(row.input_ids)))
        assert faults(empty, "masks") == {"supervised share"}
        assert "own answers" in faults(empty, "own answers")
        one = replace(clean, rows=[*clean.rows[:-1], *empty.rows[-1:]])
        assert run(one, "masks")["supervised share"].rows == (ROWS - 1,)

    def test_the_users_tokens(self, clean: Case) -> None:
        everything = with_rows(clean, lambda row: TokenRow(row.input_ids, [True] * len(row.input_ids)))
        assert faults(everything, "masks", "mask position") >= {"supervised share", "mask position"}
        swapped = with_rows(clean, lambda row: TokenRow(row.input_ids, [not on for on in row.loss_mask]))
        assert "mask position" in faults(swapped, "mask position")

    @pytest.mark.parametrize("by", [1, -1])
    def test_off_by_one(self, clean: Case, by: int) -> None:
        found = run(with_rows(clean, lambda row: shifted(row, by)), "mask position")["mask position"]
        assert (found.verdict, found.numbers["shifts"]) == ("fault", {str(by): ROWS})
        assert found.rows == tuple(range(ROWS))

    def test_two_bos(self, clean: Case) -> None:
        doubled = with_rows(clean, lambda row: TokenRow([1, *row.input_ids], [False, *row.loss_mask]))
        assert "BOS" in faults(doubled, "masks")
        assert "prompts" in faults(doubled, "mask position")

    def test_the_end_of_turn_is_not_learned(self, clean: Case) -> None:
        masked = with_rows(clean, lambda row: TokenRow(row.input_ids, [*row.loss_mask[:-1], False]))
        assert "end of turn" in faults(masked, "masks")
        cut = with_rows(clean, lambda row: TokenRow(row.input_ids[:-1], row.loss_mask[:-1]))
        job = replace(cut.job, data=replace(cut.job.data, max_new_tokens=64))
        assert "end of turn missing" in faults(replace(cut, job=job), "masks")

    def test_rows_of_another_prompt(self, clean: Case) -> None:
        changed = replace(clean.job, data=replace(clean.job.data, system="You are a pirate."))
        found = run(replace(clean, job=changed), "mask position")["prompts"]
        assert (found.verdict, found.numbers["unknown"]) == ("fault", ROWS)


class TestTemplate:
    def test_no_generation_prompt(self, clean: Case) -> None:
        template = CHAT_TEMPLATE.partition("{% if add_generation_prompt")[0]
        found = run(with_template(clean, template), "template")["generation prompt"]
        assert found.verdict == "fault"
        assert "<|im_start|>assistant" in found.fix

    def test_altered_answers(self, clean: Case) -> None:
        template = CHAT_TEMPLATE.replace("message['content']", "message['content'] | upper")
        assert faults(with_template(clean, template), "template") == {"generation prompt"}

    def test_an_empty_thinking_block_is_pointed_out(self) -> None:
        assert template_verdict(h.THINKING) == "warning"
        assert template_verdict(h.OPENS_THINKING) == "warning"
        for template in (h.CHATML, h.LLAMA3, h.MISTRAL, h.TAGGED):
            assert template_verdict(template) == "ok"

    def test_thinking_is_lost(self, clean: Case) -> None:
        strips = CHAT_TEMPLATE.replace("message['content']", "message['content'].split('</think>')[-1]")
        data = replace(clean.job.data, regenerate=False)
        talks = [conversation(i, f"<think>about {i}</think>It is {i}.") for i in range(4)]
        case = replace(clean, job=replace(clean.job, data=data), conversations=talks)
        assert faults(case, "answers kept") == set()
        lost = run(with_template(case, strips), "answers kept")["answers kept"]
        assert (lost.verdict, lost.numbers["thinking_lost"]) == ("fault", 4)

    def test_a_tokenizer_of_another_model(self, clean: Case) -> None:
        tokenizer = copy.deepcopy(clean.tokenizer)
        tokenizer.add_tokens([f"<extra{i}>" for i in range(20)])
        assert faults(with_target(clean, tokenizer=tokenizer), "tokenizer") == {"tokenizer"}
        foreign = with_template(clean, CHAT_TEMPLATE.replace("<|im_end|>", "<|eot|>"))
        found = run(foreign, "tokenizer")["tokenizer"]
        assert found.verdict == "fault"
        assert "<|eot|>" in found.evidence

    def test_the_end_of_turn_does_not_stop(self, clean: Case) -> None:
        spec = clean.target.spec
        assert faults(with_target(clean, spec=replace(spec, eos_token_ids=(0,))), "stop") == {"stop"}
        assert faults(with_target(clean, spec=replace(spec, eos_token_ids=())), "stop") == {"stop"}


def template_verdict(template: str) -> str:
    """Of a tokenizer that knows the markers of well-known templates."""

    class Templated:
        tokenizer = h.chat_tokenizer(template)

        def render(self, messages: list[Message], *, prompt: bool) -> str:
            listed = [dict(message) for message in messages]
            return str(self.tokenizer.apply_chat_template(listed, tokenize=False, add_generation_prompt=prompt))

    (found,) = all_checks()["template"].function(Templated())  # type: ignore[arg-type]
    return found.verdict


class TestTarget:
    def test_states_before_the_final_norm(self, clean: Case) -> None:
        def capture(tokens: TokenBatch, request: FeatureRequest) -> Features:
            count = clean.target.spec.num_hidden_layers
            kept: list[torch.Tensor] = []
            hook = clean.target.layout.final_norm.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
            features = clean.target.capture(tokens, FeatureRequest((*request.aux_layers, count)))
            hook.remove()
            return Features(kept[0], features.aux_hidden)

        assert faults(with_target(clean, capture=capture), "teacher logits") == {"teacher logits"}

    def test_rows_of_a_batch_mixed_up(self, clean: Case) -> None:
        def capture(tokens: TokenBatch, request: FeatureRequest) -> Features:
            features = clean.target.capture(tokens, request)
            return Features(features.last_hidden.roll(1, 0), features.aux_hidden)

        assert faults(with_target(clean, capture=capture), "teacher logits") == {"teacher logits"}

    def test_a_soft_cap_is_forgotten(self, clean: Case) -> None:
        gemma = tiny_target("gemma2")
        case = replace(clean, target=gemma, notes={})
        assert faults(case, "teacher logits") == set()
        bare = replace(gemma.unembedding, softcap=None)
        assert faults(with_target(case, unembedding=bare), "teacher logits") == {"teacher logits"}

    @pytest.mark.parametrize("by", [1, -1])
    def test_layers_off_by_one(self, clean: Case, by: int) -> None:
        def capture(tokens: TokenBatch, request: FeatureRequest) -> Features:
            moved = tuple(min(max(index + by, 0), 4) for index in request.aux_layers)
            return clean.target.capture(tokens, FeatureRequest(moved))

        found = run(with_target(clean, capture=capture), "layers")["layers"]
        assert found.verdict == "fault"
        assert f"it is that of layer {2 + by}" in found.evidence

    def test_overflow_in_float16(self, clean: Case) -> None:
        half = tiny_target("llama")
        half.model.half()
        half.dtype = torch.float16
        settings = replace(clean.job, target=replace(clean.job.target, dtype="float16"))
        case = replace(clean, target=half, job=settings, notes={})
        assert faults(case, "overflow") == set()
        with torch.no_grad():
            half.layout.layers[1].mlp.down_proj.weight.mul_(3e4)
        assert faults(case, "overflow") == {"overflow"}


class TestData:
    def test_answers_of_another_model(self, clean: Case) -> None:
        other = tiny_target("llama", seed=5)
        case = replace(clean, rows=answered(other, clean.conversations), notes={})
        found = run(case, "own answers")["own answers"]
        assert (found.verdict, found.numbers["share_suspect"] > 0.5) == ("fault", True)
        assert found.rows

    def test_a_vocabulary_without_the_end_of_turn(self, clean: Case) -> None:
        head = copy.deepcopy(clean.head)
        assert head.vocab is not None
        ids = set(head.vocab.draft_token_ids().tolist())
        head.vocab.set_tokens(ids - {EOS} | {min(set(range(97)) - ids)})
        assert faults(replace(clean, head=head), "draft vocabulary") == {"draft vocabulary ends"}

    def test_a_vocabulary_of_other_data(self, clean: Case) -> None:
        head = copy.deepcopy(clean.head)
        assert head.vocab is not None
        used = {token for row in clean.rows for token, on in zip(row.input_ids, row.loss_mask, strict=True) if on}
        unused = [token for token in range(97) if token not in used]
        head = replace_vocab(head, [EOS, *unused])
        assert "draft vocabulary" in faults(replace(clean, head=head), "draft vocabulary")

    def test_prompts_that_measure_are_trained_on(self, clean: Case, tmp_path: Path) -> None:
        text = " ".join(f"word{i}" for i in range(20))
        asked, trained = tmp_path / "asked.jsonl", tmp_path / "trained.jsonl"
        asked.write_text(json.dumps({"prompt": f"Tell me: {text}"}) + "\n")
        trained.write_text("".join(json.dumps({"prompt": f"{i} {text} ?"}) + "\n" for i in range(3)))
        job = replace(
            clean.job,
            eval=replace(clean.job.eval, prompts=[str(asked)]),
            data=replace(clean.job.data, sources=[str(trained)]),
        )
        assert faults(replace(clean, job=job), "leak") == {"leak: asked"}
        held = replace(job, data=replace(job.data, held_out=[str(asked)]))
        assert faults(replace(clean, job=held), "leak") == set()
        missing = replace(job, eval=replace(job.eval, prompts=[str(tmp_path / "no.jsonl")]))
        assert run(replace(clean, job=missing), "leak")["leak: no"].verdict == "warning"


def replace_vocab(head: DraftHead, tokens: list[int]) -> DraftHead:
    other = replace(head.config, draft_vocab_size=len(set(tokens))).build(head.spec)
    assert other.vocab is not None
    other.vocab.set_tokens(tokens)
    return other


class TestLearning:
    def test_a_frozen_head(self, clean: Case) -> None:
        frozen = copy.deepcopy(clean.head).requires_grad_(False)
        assert faults(replace(clean, head=frozen), "trained parameters", "overfit") == {"trained parameters", "overfit"}

    def test_a_target_that_would_be_trained(self, clean: Case) -> None:
        parameter = next(clean.target.model.parameters())
        parameter.requires_grad_(True)
        try:
            assert faults(clean, "trained parameters") == {"trained parameters"}
        finally:
            parameter.requires_grad_(False)

    def test_a_wrong_shift(self, clean: Case, monkeypatch: pytest.MonkeyPatch) -> None:
        """Learned perfectly, one token too far ahead."""
        forward = MedusaHead.forward

        def shifted_forward(self: MedusaHead, *args: Any) -> Any:
            return [replace(step, offset=step.offset + 1) for step in forward(self, *args)]

        monkeypatch.setattr(MedusaHead, "forward", shifted_forward)
        found = run(replace(clean), "overfit")["overfit"]
        assert found.verdict == "fault"

    def test_a_learning_rate_that_teaches_nothing(self, clean: Case) -> None:
        job = replace(clean.job, optim=replace(clean.job.optim, lr=1e-7))
        assert faults(replace(clean, job=job, overfit_steps=40), "overfit") == {"overfit"}

    def test_a_random_tensor_in_an_export(self, clean: Case, monkeypatch: pytest.MonkeyPatch) -> None:
        good = registry.find_format("medusa")

        def write(material: Any, folder: Path) -> None:
            good.write(material, folder)
            (path,) = folder.glob("*.safetensors")
            tensors = load_file(path)
            name = next(key for key in sorted(tensors) if tensors[key].dim() == 2)
            tensors[name] = torch.randn_like(tensors[name])
            save_file(tensors, path)

        find = registry.find_format
        monkeypatch.setattr(
            registry, "find_format", lambda name: replace(good, write=write) if name == "medusa" else find(name)
        )
        found = run(clean, "export")["export"]
        assert found.verdict == "fault"
        assert "medusa: " in found.evidence

    def test_drafts_that_change_the_text(self, clean: Case, monkeypatch: pytest.MonkeyPatch) -> None:
        assert clean.overfitted.known
        monkeypatch.setattr(
            "specdraft.decode.judge.accept_greedy", lambda _, tokens, __: tokens.new_tensor(len(tokens) - 1)
        )
        assert faults(clean, "greedy identity") == {"greedy identity"}


class TestResources:
    @pytest.fixture(autouse=True)
    def measured_anew(self) -> Iterator[None]:
        yield
        probe.this_machine.cache_clear()

    def test_no_room_on_the_disk(self, clean: Case, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("specdraft.plan.forecast.free_disk_bytes", lambda _: 1000)
        found = run(replace(clean), "disk")["disk"]
        assert found.verdict == "fault"
        assert "output_dir" in found.fix

    def test_no_room_in_memory(self, clean: Case, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(probe, "host_memory_bytes", lambda: 50_000.0)
        probe.this_machine.cache_clear()
        found = run(replace(clean), "memory")["memory"]
        assert found.verdict == "fault"
        assert "target.dtype=bfloat16" in found.fix

    def test_known_versions(self, clean: Case, monkeypatch: pytest.MonkeyPatch) -> None:
        assert resources.broken_versions(resources.installed_versions()) == []
        monkeypatch.setattr(resources, "installed_versions", lambda: {"transformers": "4.57.1", "torch": "2.13.0+cpu"})
        assert faults(clean, "versions") == {"version of transformers"}


def test_the_page_shows_the_worst_rows_first_and_escapes(clean: Case) -> None:
    rows = [*clean.rows[:-1], TokenRow(clean.rows[-1].input_ids, [False] * len(clean.rows[-1].input_ids))]
    case = replace(clean, rows=rows, notes={})
    findings = [*run(case, "masks").values(), Finding("x", "warning", "<script>alert(1)</script>", "mend it")]
    assert worst_rows(case, findings)[0].place == ROWS - 1
    page = html_page(case, findings)
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert page.index(f"row {ROWS - 1}:") < page.index("row 0:")
    assert re.search(r'<span class="off special" title="1">&lt;\|im_start\|&gt;</span>', page)
    assert not re.search(r"(?:src|href)=", page)
    value = json.loads(json.dumps(as_dict(case, findings)))
    assert (value["verdict"], value["counts"]["warning"] >= 1) == ("fault", True)
