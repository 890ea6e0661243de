"""`bridge.yaml`: defaults, overrides, and every problem said at once with its path and a suggestion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from bridge.errors import SpecError
from bridge.run_spec import MeshShape, RunSpec, WeightedSource, load, parse

SOURCE = "model: {source: some/model}\n"
CONTRACT = Path(__file__).resolve().parents[2] / "configs" / "presets"


def details(text: str, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(SpecError) as found:
        parse(text, overrides)
    return found.value.details


def test_every_key_but_the_source_has_the_contracts_default() -> None:
    run = parse(SOURCE)
    assert (run.engine, run.workdir, run.mesh) == ("maxtext", ".", "auto")
    assert (run.model.source, run.model.revision, run.model.tokenizer) == ("some/model", None, None)
    assert (run.data.train, run.data.eval, run.data.split) == (None, None, "train")
    assert (run.data.column, run.data.loss_on, run.data.packing) == ("messages", "completion", False)
    train = run.train
    assert (train.method, train.steps, train.sequence_length, train.batch_per_device) == ("sft", 100, 1024, 1)
    assert (train.gradient_accumulation, train.learning_rate, train.eval_every) == (1, 2.0e-5, 25)
    assert (train.save_every, train.dtype, train.weight_dtype) == (50, "bfloat16", "auto")
    assert (train.keep, train.seed) == (2, 0)
    assert run.lora.model_dump() == {
        "rank": 16,
        "alpha": 32.0,
        "dropout": 0.0,
        "targets": ("q", "k", "v", "o", "gate", "up", "down"),
        "tile_size": 32,
    }
    assert run.preference.model_dump() == {"beta": 0.1, "lambda_orpo": 0.1, "label_smoothing": 0.0}
    cluster = run.cluster
    assert (cluster.launcher, cluster.nodes, cluster.init_timeout, cluster.stall_timeout) == ("local", 1, 120, 1800)
    assert (run.maxtext, run.tunix) == ({}, {})


def test_the_source_must_be_named() -> None:
    assert details("engine: tunix\n") == ("model: Field required",)
    assert details("model: {}\n") == ("model.source: Field required",)
    assert "model.source" in details("model: {source: ''}\n")[0]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("trian: {}", "trian: unknown key (did you mean train?)"),
        ("train: {step: 5}", "train.step: unknown key (did you mean steps?)"),
        ("train: {schedule: {warm: 1}}", "train.schedule.warm: unknown key (did you mean warmup?)"),
        ("mesh: {fdsp: 2}", "mesh.fdsp: unknown key (did you mean fsdp?)"),
        ("lora: {xyz: 1}", "lora.xyz: unknown key (known: rank, alpha, dropout, targets, tile_size)"),
        ("train: {steps: 0}", "train.steps: Input should be greater than 0, found 0"),
        ("train: {steps: '5'}", "train.steps: Input should be a valid integer, found '5'"),
        ("train: {steps: 5.0}", "train.steps: Input should be a valid integer, found 5.0"),
        ("train: {learning_rate: .inf}", "train.learning_rate: Input should be a finite number, found inf"),
        ("train: {learning_rate: abc}", "train.learning_rate: Input should be a valid number, found 'abc'"),
        ("data: {packing: 1}", "data.packing: Input should be a valid boolean, found 1"),
        ("engine: megatron", "engine: Input should be 'maxtext' or 'tunix', found 'megatron'"),
        ("lora: {targets: [q, w]}", "lora.targets.1: Input should be 'q', 'k', 'v', 'o', 'gate', 'up' or 'down'"),
        ("lora: {targets: []}", "lora.targets: Tuple should have at least 1 item"),
        ("data: {train: 3}", "data.train: Input should be a valid string, found 3"),
        ("data: {train: [a, 3]}", "data.train.1: Input should be a valid string, found 3"),
        ("data: {train: [{source: a, wieght: 3}]}", "data.train.0.wieght: unknown key (did you mean weight?)"),
        ("data: {train: [{source: a, weight: 0}]}", "data.train.0.weight: Input should be greater than 0, found 0"),
        ("data: {train: [{source: a}, b]}", "data.train.1: Input should be a valid dictionary or instance of Weighted"),
        ("data: {eval: [{source: a}]}", "data.eval: weights mean nothing here"),
        ("train: {epochs: 2, steps: 5}", "train: steps 5 and epochs 2: give one, and null for the other"),
        ("train: {steps: null}", "train: neither steps nor epochs is given"),
        ("train: {epochs: 0}", "train.epochs: Input should be greater than 0, found 0"),
        ("maxtext: {hf_access_token: x}", "maxtext: hf_access_token: a token does not belong in a spec"),
    ],
)
def test_a_problem_is_said_with_its_path(text: str, line: str) -> None:
    found = [detail for detail in details(SOURCE + text + "\n") if detail.startswith(line)]
    assert found, details(SOURCE + text + "\n")


def test_a_token_is_never_repeated() -> None:
    with pytest.raises(SpecError) as found:
        parse(SOURCE + "maxtext: {hf_access_token: hf_secret}\n")
    assert "hf_secret" not in str(found.value)


def test_a_mixture_has_sources_and_weights() -> None:
    run = parse(SOURCE + "data: {train: [{source: a.jsonl, weight: 3}, {source: org/chats}]}\n")
    assert run.data.train == [WeightedSource(source="a.jsonl", weight=3.0), WeightedSource(source="org/chats")]
    assert run.data.train_names == ("a.jsonl", "org/chats")
    assert parse(SOURCE + "data: {train: a.jsonl}\n").data.train_names == ("a.jsonl",)
    assert parse(SOURCE + "data: {train: [a.jsonl, b.jsonl]}\n").data.train_names == ("a.jsonl", "b.jsonl")
    assert parse(SOURCE).data.train_names == ()
    assert RunSpec.model_validate_json(run.model_dump_json()) == run


def test_epochs_take_the_place_of_steps() -> None:
    run = parse(SOURCE + "train: {epochs: 2}\n")
    assert (run.train.steps, run.train.epochs) == (None, 2.0)
    with pytest.raises(SpecError, match="not turned into steps yet"):
        _ = run.train.total_steps
    assert RunSpec.model_validate_json(run.model_dump_json()) == run
    for text, override, expected in (
        ("train: {epochs: 2}", "train.steps=5", (5, None)),
        ("train: {steps: 7}", "train.epochs=1.5", (None, 1.5)),
        ("train: {epochs: 2}", "train.epochs=3", (None, 3.0)),
        ("engine: tunix", "train.epochs=3", (None, 3.0)),
    ):
        train = parse(f"{SOURCE}{text}\n", (override,)).train
        assert (train.steps, train.epochs) == expected
    with pytest.raises(SpecError, match="1 problem"):
        parse(SOURCE, ("train.steps=5", "train.epochs=2"))


def test_all_problems_are_said_at_once() -> None:
    found = details(SOURCE + "train: {steps: 0, nope: 1}\ndata: {packing: maybe}\nworkdir: 3\n")
    assert sorted(line.split(":")[0] for line in found) == ["data.packing", "train.nope", "train.steps", "workdir"]


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("train.steps=5", lambda run: run.train.steps == 5),
        ("train.learning_rate=1e-5", lambda run: run.train.learning_rate == 1e-5),
        ("train.learning_rate=1E-5", lambda run: run.train.learning_rate == 1e-5),
        ("lora.targets=[q, v]", lambda run: run.lora.targets == ("q", "v")),
        ("data.train=[a.jsonl, b.jsonl]", lambda run: run.data.train == ["a.jsonl", "b.jsonl"]),
        ("mesh={data: 2, fsdp: 2}", lambda run: run.mesh == MeshShape(data=2, fsdp=2)),
        ("mesh.fsdp=4", lambda run: run.mesh == MeshShape(fsdp=4)),
        ("maxtext.remat_policy=full", lambda run: run.maxtext == {"remat_policy": "full"}),
        ("model.revision=null", lambda run: run.model.revision is None),
        ("model.source=other/model", lambda run: run.model.source == "other/model"),
        ("data.packing=true", lambda run: run.data.packing is True),
    ],
)
def test_an_override_wins_over_the_text(override: str, read: Any) -> None:
    base = SOURCE + "train: {steps: 7, learning_rate: 3.0e-4}\n"
    assert not read(parse(base)) or override == "model.revision=null"
    assert read(parse(base, (override,)))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps", "is not KEY=VALUE"),
        ("=5", "is not KEY=VALUE"),
        ("engine.x=5", "engine has no keys of its own"),
        ("train.steps=[", "is not valid YAML"),
    ],
)
def test_an_override_that_cannot_be_read_is_refused(override: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse(SOURCE + "engine: maxtext\n", (override,))


@pytest.mark.parametrize("text", ["1e-5", "1.0e-5", "0.00001"])
def test_a_learning_rate_without_a_dot_is_a_number(text: str) -> None:
    assert isinstance(yaml.safe_load("1e-5"), str), "YAML 1.1 reads it as text"
    assert parse(SOURCE + f"train: {{learning_rate: {text}}}\n").train.learning_rate == 1e-5


@pytest.mark.parametrize("text", ["", "just text", "- a\n- b", "a: [", "{" * 300, "a: !!python/object:os.system x"])
def test_what_is_no_mapping_is_refused(text: str) -> None:
    with pytest.raises(SpecError):
        parse(text)


def test_files_are_read_or_named(tmp_path: Path) -> None:
    path = tmp_path / "bridge.yaml"
    with pytest.raises(SpecError, match=r"there is no .*bridge\.yaml") as found:
        load(path)
    assert "bridge init" in str(found.value)
    path.write_bytes(b"model: {source: \xff}")
    with pytest.raises(SpecError, match="cannot be read"):
        load(path)
    path.write_text(SOURCE)
    assert load(path, ("train.steps=3",)).train.steps == 3


def test_a_spec_does_not_change() -> None:
    run = parse(SOURCE)
    with pytest.raises(ValueError, match="frozen"):
        run.train.steps = 5


def test_every_preset_is_valid() -> None:
    presets = sorted(CONTRACT.glob("*.yaml"))
    assert presets
    for path in presets:
        assert isinstance(load(path), RunSpec)
