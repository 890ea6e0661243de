"""Every method of the generated program really trains; runs resume; the number of devices changes nothing."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tunix_runs import Workplace, environment, eval_losses, losses, make_workplace

from bridge.converters.parity.tunix import forward, logits
from bridge.errors import LaunchError, SpecError, UnsupportedError
from bridge.launchers import tunix_adapters, tunix_hooks, tunix_runtime
from bridge.rope import inverse_frequencies

pytestmark = pytest.mark.slow
ADAPTERS = {"tunix": {"lora": True}}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "sft": ("sft", {}),
    "lora": ("lora", {"dtype": "bfloat16"}),
    "qlora": ("qlora", {}),
    "dpo": ("dpo", {"dtype": "bfloat16", "learning_rate": 3e-4}),
    "dpo-lora": ("dpo", ADAPTERS),
    "orpo": ("orpo", {"dtype": "bfloat16"}),
    "orpo-lora": ("orpo", ADAPTERS),
}
# Loss before, and at most after 20 steps. The model is random: ln(384) and its noise; DPO begins at ln 2.
FALLS = {name: (0.6931, 0.1) if name.startswith("dpo") else (6.75, 0.9) for name in RUNS}
Train = Callable[[str], Path]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    return make_workplace(tmp_path_factory.mktemp("tunix"))


@pytest.fixture(scope="module")
def train(place: Workplace) -> Train:
    """Runs a case of `RUNS` once; gives its program, whose folder is the run's."""
    done: dict[str, Path] = {}

    def run(name: str) -> Path:
        if name not in done:
            method, changes = RUNS[name]
            done[name] = place.program(place.spec(method, **changes), name)
            runpy.run_path(str(done[name]), run_name="__main__")
        return done[name]

    return run


@pytest.mark.parametrize("name", RUNS)
def test_the_loss_falls(train: Train, name: str) -> None:
    program = train(name)
    found, evaluated = losses(program), eval_losses(program)
    before, after = FALLS[name]
    assert len(found) == 20
    assert found[0] == pytest.approx(before, abs=0.15)
    assert evaluated[0] == pytest.approx(before, abs=0.15)
    assert found[-1] < after
    assert [len(evaluated), evaluated[-1] < after] == [3, True]
    assert sorted(int(folder.name) for folder in (program.parent / "checkpoints").iterdir()) == [10, 20]
    assert list((program.parent / "tensorboard").glob("events.*"))


def test_the_checkpoint_is_the_trained_model(train: Train, place: Workplace) -> None:
    """The full checkpoint's loss in the check's own forward pass is the last eval loss; the first is PyTorch's."""
    import torch
    from transformers import LlamaForCausalLM

    program = train("sft")
    make: Any = LlamaForCausalLM
    reference = make.from_pretrained(place.hf, dtype=torch.float32)
    with torch.no_grad():
        first = mean_loss(place, lambda ids: reference(torch.tensor([ids])).logits[0])
    assert eval_losses(program)[0] == pytest.approx(first, rel=1e-5)
    item = program.parent / "checkpoints" / "20" / "model_params"
    assert mean_loss(
        place, lambda ids: logits(item, place.model, ids, range(len(ids)), constants(place))
    ) == pytest.approx(eval_losses(program)[-1], rel=1e-3)


def test_adapters_come_back_for_a_check(train: Train, place: Workplace) -> None:
    program = train("qlora")
    item = program.parent / "checkpoints" / "20" / "model_params"
    adapters = tunix_runtime.adapters(place.spec("qlora"))
    tunix_runtime.correct(constants(place))
    llama = tunix_adapters.load_trained(place.model, place.item, item, adapters)
    found = mean_loss(place, lambda ids: forward(llama, ids, range(len(ids))))
    assert found == pytest.approx(eval_losses(program)[-1], rel=1e-3)
    fresh = tunix_adapters.load(place.model, place.item, "bfloat16", None, "none", adapters)
    assert mean_loss(place, lambda ids: forward(fresh, ids, range(len(ids)))) > 6


def test_dropout_is_in_training_and_nowhere_else(place: Workplace) -> None:
    """B is 0 in the first step, where dropping changes nothing yet; the eval loss is the undropped model's."""
    short = {"steps": 3, "eval_every": 3, "save_every": 3}
    spec = place.spec("lora", lora={"dropout": 0.5}, **short)
    dropped, plain = place.program(spec, "dropout"), place.program(place.spec("lora", **short), "no-dropout")
    for program in (dropped, plain):
        runpy.run_path(str(program), run_name="__main__")
    assert losses(dropped)[0] == pytest.approx(losses(plain)[0], rel=1e-6)
    assert losses(dropped)[2] != pytest.approx(losses(plain)[2], rel=1e-3)
    item = dropped.parent / "checkpoints" / "3" / "model_params"
    adapters = replace(tunix_runtime.adapters(spec), dropout=0.0)
    llama = tunix_adapters.load_trained(place.model, place.item, item, adapters)
    found = mean_loss(place, lambda ids: forward(llama, ids, range(len(ids))))
    assert found == pytest.approx(eval_losses(dropped)[-1], rel=1e-4)
    assert found != pytest.approx(eval_losses(plain)[-1], rel=1e-3)


def constants(place: Workplace) -> tuple[float, ...]:
    return inverse_frequencies(place.model)


def mean_loss(place: Workplace, model: Callable[[list[int]], Any]) -> float:
    """Over the tokens that the eval set teaches, in f64, one conversation at a time."""
    from transformers import AutoTokenizer

    from bridge.launchers.chat import encode_chat

    load: Any = AutoTokenizer
    tokenizer = load.from_pretrained(place.hf)
    parts = []
    for line in (place.folder / "eval.jsonl").read_text().splitlines():
        encoded = encode_chat(tokenizer, json.loads(line)["messages"], "completion")
        values = np.asarray(model(encoded.ids.tolist()), np.float64)[:-1]
        picked = np.take_along_axis(values, encoded.ids[1:, None].astype(int), 1)[:, 0]
        parts.append((np.log(np.exp(values).sum(1)) - picked)[encoded.loss[1:]])
    return float(np.concatenate(parts).mean())


@pytest.mark.parametrize(
    ("method", "changes"),
    [("sft", {"gradient_accumulation": 2, "batch_per_device": 4}), ("dpo", {**ADAPTERS, "lora": {"dropout": 0.3}})],
)
def test_a_stopped_run_goes_on(
    place: Workplace, monkeypatch: pytest.MonkeyPatch, method: str, changes: dict[str, Any]
) -> None:
    """Three examples a step of eight: where a resumed run takes its next example, or what it drops, shows at once."""
    spec = place.spec(method, **{"steps": 8, "save_every": 4, "eval_every": 0, **changes, "batch_per_device": 3})
    whole, stopped = (place.program(spec, f"{method}-{name}") for name in ("whole", "stopped"))
    runpy.run_path(str(whole), run_name="__main__")
    feed = tunix_hooks.Feed.load_next_train_batch

    def stop(self: Any, trainer: Any) -> Any:
        if trainer.train_steps == 6:
            trainer.checkpoint_manager._checkpoint_manager.wait_until_finished()
            raise KeyboardInterrupt
        return feed(self, trainer)

    with monkeypatch.context() as patched:
        patched.setattr(tunix_hooks.Feed, "load_next_train_batch", stop)
        with pytest.raises(KeyboardInterrupt):
            runpy.run_path(str(stopped), run_name="__main__")
    interrupted = losses(stopped)
    runpy.run_path(str(stopped), run_name="__main__")
    assert 4 <= len(interrupted) < 8
    np.testing.assert_allclose(losses(stopped), losses(whole), rtol=1e-5)
    assert len(set(np.round(losses(whole), 6))) == 8


ON_DEVICES = """
import runpy, sys
for program in sys.argv[1:]:
    runpy.run_path(program, run_name="__main__")
"""


@pytest.mark.parametrize(
    ("devices", "mesh", "cases"),
    [(2, "auto", ("sft", "dpo-lora")), (4, {"fsdp": 2, "tensor": 2}, ("sft", "qlora")), (8, "auto", ("sft",))],
    ids=["2", "4", "8"],
)
def test_devices_change_nothing(
    train: Train, place: Workplace, devices: int, mesh: Any, cases: tuple[str, ...]
) -> None:
    programs = []
    for name in cases:
        method, changes = RUNS[name]
        short = {"steps": 3, "eval_every": 0, "batch_per_device": 8 // devices, "mesh": mesh}
        programs.append(place.program(place.spec(method, **{**changes, **short}), f"{name}-{devices}"))
    command = [sys.executable, "-W", "ignore", "-c", ON_DEVICES, *map(str, programs)]
    done = subprocess.run(command, env=environment(devices), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    shape = f"fsdp {devices} x tensor 1" if mesh == "auto" else "fsdp 2 x tensor 2"
    assert done.stdout.count(f"mesh: {shape} on 1 process(es)") == len(cases)
    for name, program in zip(cases, programs, strict=True):
        np.testing.assert_allclose(losses(program), losses(train(name))[:3], rtol=2e-3, atol=1e-4)


def test_a_run_that_cannot_be_is_refused(
    place: Workplace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain `python` shows the reason, not a traceback, and ends with 1; nothing is loaded before the checks."""
    import jax

    program = place.program(place.spec("lora"), "refused")
    text = program.read_text(encoding="utf-8")
    for broken, reason in ((text.replace("mlp=96", "mlp=100"), "does not match the model: 3 of 12 arrays"),):
        assert broken != text
        program.write_text(broken, encoding="utf-8")
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(program), run_name="__main__")
        assert end.value.code == 1
        assert reason in capsys.readouterr().err
    program.write_text(text.replace('"down"]', '"upp"]'), encoding="utf-8")
    with pytest.raises(SpecError, match="1 problem") as error:
        runpy.run_path(str(program), run_name="__main__")
    assert error.value.details[0].startswith("lora.targets.6: ")
    with pytest.raises(SpecError, match="does not make up 1 device"):
        tunix_runtime.make_mesh(place.spec("sft", mesh={"fsdp": 2}), place.model)
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    with pytest.raises(UnsupportedError, match="no data axis"):
        tunix_runtime.make_mesh(place.spec("sft", mesh={"data": 2, "fsdp": 1}), place.model)


def test_a_loss_that_is_no_number_ends_the_run(tmp_path: Path) -> None:
    from bridge.launchers.metrics import MetricsLog
    from bridge.launchers.progress import StepClock

    watch = tunix_hooks.Watch(MetricsLog(tmp_path), StepClock(2, 1), [0.0])
    with pytest.raises(LaunchError, match="the loss of step 1 is nan"):
        watch.on_train_step_end(None, 1, np.float32("nan"))
