"""What a run says and records of each step, how it is shown, and FLOPs against PyTorch's own count."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Tiny
from llama_shapes import LLAMA_8B

from bridge import flops
from bridge.commands import step_lines
from bridge.commands.step_lines import StepLines
from bridge.launchers import progress
from bridge.launchers.metrics import MetricsLog
from bridge.launchers.progress import StepClock
from bridge.launchers.rows import Examples, Rows
from bridge.launchers.tokenizer import Encoded
from bridge.model_spec import ModelSpec
from bridge.run_spec import parse

Clock = Callable[[float], None]


@pytest.fixture
def tick(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Sets the clock by which steps are timed."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])

    def to(seconds: float) -> None:
        now[0] = seconds

    return to


def test_one_line_says_it_all(tick: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    """2048 tokens and 3e12 FLOPs a step, on devices of 10 TFLOPS together; the first step is not in the time left."""
    clock = StepClock(4, 2048, 3.0e12, 10.0e12)
    clock.begin(1)
    tick(9.0)
    clock.begin(2)
    assert clock.report(1, 2.5) == {"step_time": 9.0, "tokens_per_second": 227.6, "mfu": 0.0333}
    tick(9.5)
    clock.end(2)
    tick(30.0)  # an evaluation is no training
    assert clock.report(2, 2.25, 2.125) == {"step_time": 0.5, "tokens_per_second": 4096.0, "mfu": 0.6}
    assert capsys.readouterr().out.splitlines() == [
        "bridge: step 1/4  loss 2.5000  228 tokens/s  MFU 3.3 %  0:27 left",
        "bridge: step 2/4  loss 2.2500  eval 2.1250  4,096 tokens/s  MFU 60.0 %  0:01 left",
    ]


def test_the_clock_of_a_run(tick: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A known device: 2 rows of 64 tokens, twice a step, in 2 s, of what one device could do in that time."""
    import jax

    model = ModelSpec(2, 8, 2, 2, 4, 16, 10, True, 1e4, None, 1e-5, 128, "float32")
    run = parse("model: {source: m}\ntrain: {sequence_length: 64, gradient_accumulation: 2, steps: 3}\n")
    rows = Rows(Examples.of([Encoded(np.arange(4, dtype=np.int32), np.ones(4, bool))] * 2), 64, False, 0, 2)
    monkeypatch.setitem(flops.PEAKS, jax.devices()[0].device_kind, (1e-3, "a device of 1 GFLOPS"))
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    clock = progress.clock_of(run, model, rows, adapters=False)
    clock.begin(1)
    tick(2.0)
    weights = 2 * (4 * 8 * 8 + 3 * 8 * 16) + 10 * 8
    spent = 256 * (6 * weights + 3 * 2 * 2 * 2 * 4 * 64)
    assert clock.report(1, 1.0) == {"step_time": 2.0, "tokens_per_second": 128.0, "mfu": round(spent / 2e9, 4)}
    single = run.model_copy(update={"train": run.train.model_copy(update={"dtype": "float32"})})
    clock = progress.clock_of(single, model, rows, adapters=False)
    assert "mfu" not in clock.report(1, 1.0)


def test_no_peak_no_utilisation(tick: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    clock = StepClock(2000, 10)
    clock.begin(1)
    tick(4.0)
    assert list(clock.report(1, 1.0)) == ["step_time", "tokens_per_second"]
    assert capsys.readouterr().out == "bridge: step 1/2000  loss 1.0000  2 tokens/s  2:13:16 left\n"


def test_the_newest_eval_loss(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    assert log.last_eval is None
    log.eval(10, 1.0)
    log.eval(20, 2.0)
    assert log.last_eval == 2.0
    assert MetricsLog(tmp_path).last_eval == 2.0  # a resumed run


LINES = [
    "training 40 steps of 2 rows",
    "step 1/40  loss 3",
    "step 2/40  loss 2",
    "step 3/40  loss 1",
    "step 20  eval loss 1",
    "step 40/40  loss 0",
]


class Display(io.StringIO):
    """A display that replaces lines: a terminal, or a notebook's cell by its class's module."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


def shown(stream: Display, monkeypatch: pytest.MonkeyPatch, verbose: bool = False) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    lines = StepLines(40, verbose)
    for line in LINES:
        lines.show(line)
    return stream.getvalue()


def visible(text: str) -> list[str]:
    """What a display that knows line feed and carriage return shows in the end."""
    rows = []
    for row in text.split("\n"):
        cells: list[str] = []
        for part in row.split("\r"):
            cells[: len(part)] = part
        rows.append("".join(cells).rstrip())
    return rows


def test_a_pipe_gets_some_steps_and_all_else(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(Display(terminal=False), monkeypatch)
    assert text.splitlines() == [*LINES[:3], *LINES[4:]]  # forty steps: each second one
    assert "\r" not in text
    assert shown(Display(terminal=False), monkeypatch, verbose=True).splitlines() == LINES


@pytest.mark.parametrize("where", ["terminal", "notebook"])
def test_a_display_shows_the_step_in_one_place(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Display(terminal=where == "terminal")
    if where == "notebook":
        monkeypatch.setattr(Display, "__module__", "ipykernel.iostream")
        assert step_lines.__name__  # the class is looked at, the package need not be installed
    text = shown(stream, monkeypatch)
    assert visible(text) == [LINES[0], LINES[4], LINES[5]]
    assert "\x1b" not in text


def test_a_line_is_cut_where_it_would_wrap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "12")
    assert visible(shown(Display(terminal=True), monkeypatch))[-1] == "step 40/40 "[:11].rstrip()


@pytest.mark.parametrize(
    ("kind", "devices", "dtype", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", 8, "bfloat16", 8 * 989.5e12),
        ("NVIDIA A100-SXM4-80GB", 1, "bfloat16", 312e12),
        ("NVIDIA H200", 1, "bfloat16", 989.5e12),
        ("NVIDIA L4", 1, "bfloat16", 121e12),
        ("NVIDIA GeForce RTX 3090", 1, "bfloat16", 71e12),
        ("NVIDIA GeForce RTX 4090", 1, "bfloat16", 165.2e12),
        ("TPU v4", 4, "bfloat16", 1100e12),
        ("TPU v5 lite", 1, "bfloat16", 197e12),
        ("TPU v5", 1, "bfloat16", 459e12),
        ("TPU v6 lite", 1, "bfloat16", 918e12),
        ("NVIDIA H100 80GB HBM3", 1, "float32", None),  # the peak is bfloat16's
        ("NVIDIA L40", 1, "bfloat16", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 1, "bfloat16", None),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 1, "bfloat16", None),
        ("cpu", 1, "bfloat16", None),
    ],
)
def test_peaks(kind: str, devices: int, dtype: str, expected: float | None) -> None:
    assert flops.peak(kind, devices, dtype) == pytest.approx(expected)
    assert all(source and tflops > 0 for tflops, source in flops.PEAKS.values())


def test_flops_of_llama_8b_by_hand() -> None:
    """32 layers of 218,103,808 projection weights and a head of 128,256 x 4,096, on rows of 1,024 tokens."""
    weights = 32 * 218_103_808 + 128_256 * 4096
    attention = 32 * 4096 * 1024 * 2
    assert flops.a_token(LLAMA_8B, parse("model: {source: m}"), 1024, False) == 6 * weights + 3 * attention
    dpo = parse("model: {source: m}\ntrain: {method: dpo}")
    assert flops.a_token(LLAMA_8B, dpo, 1024, False) == 8 * weights + 4 * attention
    lora = parse("model: {source: m}\nlora: {rank: 4, targets: [q]}")
    assert flops.a_token(LLAMA_8B, lora, 1024, True) == 4 * weights + 6 * 32 * 4 * 8192 + 3 * attention


@pytest.mark.parametrize("adapters", [False, True])
def test_flops_are_those_that_pytorch_counts(adapters: bool, tiny: Tiny) -> None:
    """PyTorch computes the masked half of attention too, its RoPE angles by a product, and no gradient for what lies
    before the first adapter."""
    import torch
    from peft import LoraConfig, get_peft_model
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForCausalLM

    folder, length = tiny("tied", dtype="float32"), 64
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    if adapters:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=targets))
    ids = torch.arange(2 * length).reshape(2, length) % 50
    with FlopCounterMode(display=False) as counter:
        model(ids, labels=ids).loss.backward()
    facts = ModelSpec.from_folder(folder)
    run = parse("model: {source: m}\nlora: {rank: 4}")
    masked = 6 * facts.layers * facts.heads * facts.head_dim * length
    expected = 2 * length * (flops.a_token(facts, run, length, adapters) + masked) + facts.head_dim * length
    if not adapters:
        assert counter.get_total_flops() == expected
        return
    first = 2 * (facts.heads + 2 * facts.kv_heads) * facts.head_dim * facts.embed + 3 * 2 * 4 * facts.embed
    assert counter.get_total_flops() == expected - 2 * length * first
