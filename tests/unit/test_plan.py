"""Forecasts against what runs really take: bytes on disk, memory, steps, the arithmetic of time; and what is refused."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from specdraft.cli.main import main
from specdraft.cli.plan import job_of
from specdraft.config.overrides import prepare_overrides
from specdraft.config.store import compose_config, to_run
from specdraft.core.errors import ConfigError, DataError
from specdraft.data._config import DataConfig
from specdraft.data.feature_layout import kept_counts, row_counts, store_bytes
from specdraft.data.prepared import load_prepared
from specdraft.heads.base import DraftHead, head_kinds
from specdraft.plan import head_cost as costs
from specdraft.plan import machines, probe
from specdraft.plan.disk import optimizer_bytes, safetensors_bytes
from specdraft.plan.forecast import Forecast, forecast, memory_problem
from specdraft.plan.head_cost import head_cost, tracked
from specdraft.plan.job import Job
from specdraft.plan.measuring import Recorder, rates
from specdraft.plan.sampling import source_sample
from specdraft.plan.sizes import target_sizes
from specdraft.plan.times import Measured, answering_seconds, measured_times
from specdraft.plan.workload import Schedule, Workload, sampled_workload
from specdraft.targets._config import TargetConfig
from specdraft.train.optim import build_optimizer
from tests.cli import experiment_words, make_workspace
from tests.support import SPEC
from tests.tiny import tiny_target
from tests.training import make_head, make_rows, make_run, reset_accelerator

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("plan"))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def job(workspace: Path, *words: str) -> Job:
    overrides = prepare_overrides("train", [*experiment_words(workspace), "name=x", *words])
    return job_of(to_run("train", compose_config("train", overrides)))


class TestDisk:
    def test_a_file_of_tensors_to_the_byte(self, tmp_path: Path) -> None:
        tensors = {"a.weight": torch.zeros(3, 5), "step": torch.zeros(()), "t2d": torch.zeros(97, dtype=torch.bool)}
        save_file(tensors, tmp_path / "x", metadata={"format": "pt"})
        listed = {"a.weight": ("F32", (3, 5)), "step": ("F32", ()), "t2d": ("BOOL", (97,))}
        assert safetensors_bytes(listed, {"format": "pt"}) == (tmp_path / "x").stat().st_size

    def test_what_a_run_leaves_within_three_percent(self, workspace: Path, here: Path) -> None:
        words = ["head=eagle3", "head.draft_vocab_size=64", "trainer.ema_decay=0.9", "head.num_draft_tokens=2"]
        words += ["trainer.epochs=3", "tracker=none"]
        expected = forecast(job(workspace, *words)).disk
        assert main(["train", *experiment_words(workspace), "name=x", *words]) == 0
        folder = here / "outputs" / "x"
        found = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        assert expected.checkpoints + expected.heads + expected.log == pytest.approx(found, rel=0.03)

    def test_a_store_of_features(self, workspace: Path) -> None:
        """The forecast from the settings against the exact layout of the rows; tests of the store hold that to its files."""
        words = ["head=eagle3", "head.num_draft_tokens=2", "head.draft_vocab_size=64", "features=offline"]
        planned = forecast(job(workspace, *words))
        rows = [length for length in planned.schedule.workload.lengths]
        share = planned.schedule.workload.supervised_share
        masks = [torch.arange(n) >= n - round(n * share) for n in rows]
        offsets = torch.tensor([0, *rows]).cumsum(0)
        request = planned.head.features()
        exact = store_bytes(kept_counts(row_counts(torch.cat(masks), offsets, request)), request, 32, "bf16")
        assert planned.disk.features == pytest.approx(exact, rel=0.03)
        assert forecast(job(workspace, *words[:3])).disk.features == 0


class TestMemory:
    @pytest.mark.parametrize("optimizer", ["adamw", "muon"])
    def test_weights_gradients_and_optimizer_to_the_byte(self, workspace: Path, optimizer: str) -> None:
        planned = job(workspace, f"optim.optimizer={optimizer}")
        head = make_head("eagle3")
        state = build_optimizer(head, planned.optim)
        for parameter in head.parameters():
            parameter.grad = torch.zeros_like(parameter)
        state.step()
        held = sum(value.nbytes for values in state.state.values() for value in values.values())
        assert optimizer_bytes(replace(planned, head=head.config), head) == held

    def test_a_target_to_the_byte(self, workspace: Path) -> None:
        config = TargetConfig(name=str(workspace / "target"), pack_weights=False)
        sizes = target_sizes(config)
        model = tiny_target("llama").model
        assert sizes.weight_bytes(config, "cpu") == sum(p.nbytes for p in model.parameters())
        assert sizes.weight_bytes(replace(config, dtype="bfloat16"), "cuda") == sizes.num_parameters * 2
        packed = replace(config, pack_weights=True)
        assert sizes.weight_bytes(packed, "cpu") > sizes.weight_bytes(packed, "cuda")
        assert sizes.spec.hidden_size == 32

    @pytest.mark.parametrize("kind", head_kinds())
    def test_activations_of_every_kind_within_five_percent(self, kind: str) -> None:
        """Predicted by narrow and short copies, against the head itself, four times as wide, on a longer row."""
        spec = replace(SPEC, hidden_size=128, intermediate_size=256, head_dim=32, max_position_embeddings=512)
        config = head_kinds()[kind](kind=kind, num_draft_tokens=2)
        for precision in ("no", "bf16"):
            cost = head_cost(config, spec, 0.5, precision)
            held, flops = costs._measure(config, spec, 160, 0.5, precision != "no")
            assert cost.memory_bytes(1, 160) == pytest.approx(held, rel=0.05)
            assert cost.row_flops(160) == pytest.approx(flops, rel=0.05)

    def test_the_tracker_counts_what_lives_together(self) -> None:
        with tracked() as memory:
            first = torch.zeros(1000)
            del first
            second = torch.zeros(500)
            view = second[:10]
            third = view + 1
        assert (memory.peak, memory.at_end) == (4000, 2040)
        assert third.numel() == 10
        with tracked() as product:
            torch.zeros(2, 3) @ torch.zeros(3, 4)
        assert product.flops == 2 * 2 * 3 * 4

    def test_the_process_may_have_less_than_the_machine(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        limit = tmp_path / "memory.max"
        monkeypatch.setattr(machines, "CGROUP_LIMITS", (limit,))
        whole = machines.host_memory_bytes()
        limit.write_text("max\n")
        assert machines.host_memory_bytes() == whole
        limit.write_text("123456\n")
        assert machines.host_memory_bytes() == 123456


class TestWorkload:
    @pytest.mark.parametrize(
        "settings", [{"epochs": 3}, {"max_tokens": 400}, {"epochs": 2, "accumulation_steps": 2}, {"max_steps": 5}]
    )
    def test_steps_are_those_of_the_loop(self, workspace: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
        rows = make_rows(13)
        run = make_run(tmp_path, rows=rows, batch_size=2, trainer=settings)
        planned = job(workspace)
        planned = replace(planned, trainer=run.trainer, data=replace(planned.data, batch_size=2))
        lengths = [len(row.input_ids) for row in rows]
        workload = sampled_workload(lengths, 60, 13, 13, planned)
        assert Schedule(planned, workload).steps == run.total_steps
        assert Schedule(planned, workload).padding == pytest.approx(run.plan.padding_share())

    def test_a_sample_stands_for_all(self, workspace: Path) -> None:
        planned = job(workspace, "data.batch_size=4")
        workload = sampled_workload([10, 20, 30, 40], 50, 4, 400, planned)
        assert (workload.num_rows, workload.num_tokens, workload.mean_length) == (400, 10_000, 25)
        assert Schedule(planned, workload).epoch_steps == 100
        assert sampled_workload([10, 20], 15, 2, 100_000, planned).num_rows == 100_000

    def test_large_sources_are_counted_and_not_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("specdraft.plan.sampling.READ", 20)
        for name, count in (("a", 300), ("b", 100), ("c", 7)):
            path = tmp_path / f"{name}.jsonl"
            path.write_text("".join(json.dumps({"prompt": f"{name} {i}"}) + "\n" for i in range(count)))
        both = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
        found = source_sample(DataConfig(sources=both), 8)
        assert (found.total, len(found.conversations), found.is_exact) == (400, 8, True)
        assert {one.user_turns[0][0] for one in found.conversations} == {"a", "b"}
        assert source_sample(DataConfig(sources=both, limit=30), 8).total == 30
        assert source_sample(DataConfig(sources=both, weights=[0.5, 0.5]), 8).total == 200
        assert source_sample(DataConfig(sources=[str(tmp_path / "c.jsonl")]), 64).total == 7
        (tmp_path / "d.jsonl").write_text("\n")
        with pytest.raises(DataError, match=r"^data\.sources: no usable conversation"):
            source_sample(DataConfig(sources=[str(tmp_path / "d.jsonl")]), 4)


class TestTime:
    def workload(self) -> Workload:
        return Workload([100], 1000, 1000, 40.0, 60.0, 40.0, "test")

    def found(self, planned: Job, head: DraftHead) -> Any:
        measured = Measured(0.01, 1e-3, 2e-3, 0.1, 0.0, 18)
        zero = forecast(planned).here.times
        return measured_times(planned, head, Schedule(planned, self.workload()), measured, zero)

    def test_from_measured_rates(self, workspace: Path) -> None:
        """1,000 rows of 100 tokens, two epochs, 8 prompts of 16 tokens after each."""
        words = ["trainer.epochs=2", "trainer.eval_prompts=8", "trainer.eval_max_new_tokens=16"]
        head = make_head("eagle3")
        times = self.found(job(workspace, *words), head)
        assert asdict(times) == pytest.approx({"prepare": 400, "features": 200, "training": 400, "evaluation": 25.6})
        assert times.total == pytest.approx(1025.6)
        kept = self.found(job(workspace, *words, "trainer.feature_memory_gib=1"), head)
        assert kept.features == pytest.approx(100)
        assert self.found(job(workspace, *words, "features=offline"), head).features == pytest.approx(100)
        half = self.found(job(workspace, "trainer.epochs=2", "trainer.max_minutes=2.5"), head)
        assert half.features + half.training == pytest.approx(150)

    def test_answers_take_as_long_as_their_prompts_and_their_steps(self, workspace: Path) -> None:
        """Each prompt is read alone, however long the others are; a batch of any size writes a token of each row a step."""
        planned = job(workspace, "data.generate_batch_size=64")
        found = forecast(planned)
        machine = replace(found.here.machine, flops=1e6, bandwidth=1e15, step_s=0.0)
        sample = Workload([18] * 60 + [98] * 4, 64, 64, 8.0, 15.0, 8.0, "test")
        one = answering_seconds(planned, found.sizes, sample, machine)
        all_rows = answering_seconds(planned, found.sizes, replace(sample, num_rows=12_800), machine)
        assert all_rows / one == pytest.approx(200)
        prompts = {n: n * found.sizes.forward_flops(n / 2, lm_head=False) / 1e6 for n in (10, 90)}
        steps = 8 * 64 * found.sizes.forward_flops(sample.mean_length, lm_head=True) / 1e6
        assert one == pytest.approx(60 * prompts[10] + 4 * prompts[90] + steps, rel=1e-3)
        slow = replace(machine, flops=1e18, bandwidth=1e18, step_s=0.5)
        assert answering_seconds(planned, found.sizes, sample, slow) == pytest.approx(0.5 * (64 + 8), rel=1e-3)
        measured = Measured(0.01, 1e-3, 2e-3, 0.1, 0.0, 18, answers_factor=3.0)
        fallback = replace(found.here.times, prepare=all_rows)
        schedule = Schedule(planned, sample)
        assert measured_times(planned, found.head, schedule, measured, fallback).prepare == pytest.approx(3 * all_rows)
        served = replace(planned, data=replace(planned.data, regenerate=False))
        assert answering_seconds(served, found.sizes, replace(sample, answer=0.0), machine) == 0.0

    def test_steps_after_the_first_ones_count(self) -> None:
        recorder = Recorder()
        for step, rate in enumerate([1.0, 1.0, 100.0, 100.0, 50.0], 1):
            recorder.log(step, {"tokens": 100.0 * step, "tokens_per_s": rate, "time/target": 0.25})
            recorder.log(step, {"eval/acceptance_length": 1.0})
        found = rates(recorder, 0.5, None, 7.0)
        assert (found.target_s, found.draft_s) == pytest.approx((4 * 0.25 / 300, 4 * 0.75 / 300))
        assert (found.steps, found.answer_s, found.peak_bytes) == (3, 0.5, 7.0)

    def test_a_larger_machine_is_faster(self, workspace: Path) -> None:
        found = forecast(job(workspace), [machines.gpu("l4"), machines.gpu("h100")])
        _, small, large = found.outlooks
        assert small.times.total > large.times.total > 0
        with pytest.raises(ConfigError, match=r"^machines: no such GPU in the table, got 'h1000'; use rtx3090"):
            machines.gpu("h1000")

    def test_texts(self) -> None:
        sizes = [machines.size_text(value) for value in (0, 999, 1.23456e6, 4.5e12)]
        assert sizes == ["0 B", "999 B", "1.23 MB", "4.5 TB"]
        assert [machines.time_text(s) for s in (0.25, 45, 600, 9000, 1e6)] == [
            "0.25 s",
            "45 s",
            "10 min",
            "2.5 h",
            "11.6 days",
        ]


class TestRefusals:
    def small(self, planned: Forecast, memory: float) -> Any:
        machine = replace(planned.here.machine, memory_bytes=memory)
        return planned.outlook(machine)

    def test_memory(self, workspace: Path) -> None:
        planned = forecast(job(workspace, "head=medusa", "target.pack_weights=true"))
        assert memory_problem(planned.here, planned.job) is None
        problem = str(memory_problem(self.small(planned, 1e5), planned.job))
        assert problem.startswith("target.dtype: the target's weights take ")
        assert problem.endswith("target.quantization=int8 or int4, or target.device_map=auto")
        assert "use target.pack_weights=false" in problem
        large = forecast(job(workspace, "head=eagle3"))
        assert str(memory_problem(self.small(large, 1e5), large.job)).startswith(
            "head.draft_vocab_size: the head with its"
        )
        spread_out = replace(planned.job, target=TargetConfig(device_map="auto"))
        assert memory_problem(self.small(planned, 1e5), spread_out) is None

    def test_disk(self, workspace: Path) -> None:
        planned = replace(forecast(job(workspace)), free_disk=1000.0)
        with pytest.raises(ConfigError, match=r"^output_dir: the run needs .* lower trainer\.keep_checkpoints"):
            planned.refuse()
        stored = replace(planned, disk=replace(planned.disk, features=1e9))
        with pytest.raises(ConfigError, match=r"features=online"):
            stored.refuse()


class TestCommand:
    @pytest.fixture(autouse=True)
    def fresh(self) -> None:
        reset_accelerator()

    def test_figures_alone_on_stdout(self, workspace: Path, here: Path, capsys: Captured) -> None:
        words = [*experiment_words(workspace), "head=medusa", "head.num_draft_tokens=2", "data.regenerate=true"]
        assert main(["plan", *words, "steps=5", "rows=4", "trainer.eval_prompts=2", "json=-", "machines=[h100]"]) == 0
        captured = capsys.readouterr()
        value = json.loads(captured.out)
        assert value["measured"]["steps"] == 3
        assert [machine["name"] for machine in value["machines"]] == ["this machine", "h100"]
        assert value["machines"][0]["seconds"]["prepare"] > 0
        assert value["optimizer_steps"] == 3
        assert "5 steps" in captured.err
        assert list(here.iterdir()) == []

    def test_from_the_settings_alone(self, workspace: Path, here: Path, capsys: Captured) -> None:
        assert main(["plan", *experiment_words(workspace), "steps=0", "json=plan.json", "features=offline"]) == 0
        out = capsys.readouterr().out
        assert out.startswith("forecast: 6 rows, ")
        assert json.loads((here / "plan.json").read_text())["disk_bytes"]["features"] > 0
        assert main(["plan", *experiment_words(workspace), "steps=0", "json=no/plan.json"]) == 2

    def test_what_cannot_fit_is_refused_by_every_long_command(
        self, workspace: Path, here: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("specdraft.plan.forecast.free_disk_bytes", lambda _: 1000)
        for command in (["plan", "steps=0"], ["prepare", "name=x"], ["train", "name=x"]):
            assert main([*command, "head=medusa", *experiment_words(workspace)]) == 2
            assert "specdraft: error: output_dir: the run needs" in capsys.readouterr().err
        assert list(here.iterdir()) == []
        monkeypatch.undo()
        monkeypatch.chdir(here)
        monkeypatch.setattr(probe, "host_memory_bytes", lambda: 1e5)
        probe.this_machine.cache_clear()
        try:
            assert main(["plan", "steps=0", "head=medusa", *experiment_words(workspace)]) == 2
            assert main(["plan", "steps=0", "head=medusa", "machines=[l4]", *experiment_words(workspace)]) == 0
        finally:
            probe.this_machine.cache_clear()

    def test_what_is_prepared_counts_as_it_is(self, workspace: Path, here: Path, capsys: Captured) -> None:
        words = ["data.regenerate=true"]
        before = forecast(job(workspace, *words))
        assert not before.schedule.workload.is_prepared and before.here.times.prepare > 0
        assert main(["prepare", *experiment_words(workspace), "name=x", *words]) == 0
        (rows,) = (load_prepared(path.parent) for path in (here / "outputs" / "data").glob("*/manifest.json"))
        after = forecast(job(workspace, *words))
        assert after.schedule.workload.lengths == list(rows.lengths)
        share = rows.manifest["supervised_share"]
        assert after.schedule.workload.supervised_share == pytest.approx(share)
        assert after.here.times.prepare == 0
        capsys.readouterr()
        assert main(["plan", "steps=12", *experiment_words(workspace), "name=x", *words, "json=-"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["origin"], found["tokens"]) == ("prepared before", sum(rows.lengths))
        assert found["machines"][0]["seconds"]["prepare"] == 0
        for other in ("target.dtype=bfloat16", "data.max_new_tokens=7", "data.seed=1 data.limit=3"):
            assert not forecast(job(workspace, *words, *other.split())).schedule.workload.is_prepared

    def test_long_commands_begin_with_the_forecast(self, workspace: Path, here: Path, capsys: Captured) -> None:
        assert main(["prepare", *experiment_words(workspace), "name=x"]) == 0
        first, second = capsys.readouterr().out.splitlines()[:2]
        assert first.startswith("forecast: 6 rows")
        assert second.startswith("forecast: memory ")
