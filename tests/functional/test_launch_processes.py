"""Both engines train on two real processes: the losses of one process, checkpoints, stops, kills and resumes."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from pathlib import Path

import numpy as np
import pytest
from launch_runs import Workplace, make_workplace, process_of
from processes import is_running, wait_for
from safetensors.numpy import load_file

from bridge.launchers.local import free_port

STEPS, EVERY = 400, 4


@pytest.fixture(scope="module")
def maxtext(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    return make_workplace(tmp_path_factory.mktemp("launch"), "maxtext")


@pytest.fixture(scope="module")
def tunix(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    return make_workplace(tmp_path_factory.mktemp("launch"), "tunix")


@pytest.mark.slow
def test_killed_resumed_and_stopped_is_as_one_process(maxtext: Workplace) -> None:
    """MaxText SFT on two processes; one process without a break, with the same global batch, is the reference."""
    two = ("launch", "sft", f"train.steps={STEPS}", f"train.save_every={EVERY}", "--processes", "2", "--run", "two")
    kill_one(maxtext, two, after=2 * EVERY + 1)
    saved, before = newest(maxtext, "two"), len(maxtext.steps("two"))
    assert saved > 0
    assert saved % EVERY == 0

    # Steps after the last checkpoint are in the log already: it is the resumed run that has to get beyond them.
    last, text = stop(maxtext, (*two, "--resume"), after=max(maxtext.steps("two")) + EVERY + 1)
    assert f"resuming two at step {saved} of {STEPS}" in text
    assert maxtext.steps("two")[before:] == list(range(saved + 1, last + 1))

    maxtext.bridge("launch", "sft", f"train.steps={last}", "train.batch_per_device=4", "--run", "one")
    expected, losses = maxtext.losses("one"), maxtext.losses("two")
    assert sorted(expected) == sorted(losses) == list(range(1, last + 1))
    assert expected[last] < 0.5 * expected[1]
    np.testing.assert_allclose([losses[k] for k in sorted(losses)], [expected[k] for k in sorted(expected)], rtol=1e-4)
    same_weights(maxtext, last)


def kill_one(workplace: Workplace, two: tuple[str, ...], after: int, run: str = "two") -> None:
    """SIGKILL to process 1: all ends within seconds, and it is named."""
    popen = workplace.start(*two)
    workplace.wait_for_step(run, after, popen)
    run_dir = workplace.folder / "runs" / run
    first, second = (process_of(run_dir, number) for number in (0, 1))
    os.kill(second, signal.SIGKILL)
    start = time.monotonic()
    text, _ = popen.communicate(timeout=60)
    assert time.monotonic() - start < 10
    assert popen.returncode == 137, text
    assert "process 1 ended with signal SIGKILL" in text
    assert not is_running(first)


def stop(workplace: Workplace, two: tuple[str, ...], after: int) -> tuple[int, str]:
    """SIGTERM to the launcher: a checkpoint of the step that all agree on is saved. Returns it, and the output."""
    popen = workplace.start(*two)
    workplace.wait_for_step("two", after, popen)
    popen.terminate()
    start = time.monotonic()
    text, _ = popen.communicate(timeout=60)
    assert popen.returncode == 128 + signal.SIGTERM, text
    assert time.monotonic() - start < 40
    found = re.search(r"stopped by SIGTERM after step (\d+); its checkpoint is saved", text)
    assert found, text
    assert newest(workplace, "two") == int(found[1])
    return int(found[1]), text


def newest(workplace: Workplace, run: str) -> int:
    """The newest finished checkpoint of a run."""
    folder = workplace.folder / "runs" / run / "checkpoints"
    steps = [path for path in folder.iterdir() if path.name.isdigit() and (path / "_CHECKPOINT_METADATA").exists()]
    return max(int(path.name) for path in steps)


def same_weights(workplace: Workplace, step: int) -> None:
    """`bridge export` reads both runs' checkpoints; the weights are equal within f32 rounding of the steps."""
    exports = {}
    for run in ("one", "two"):
        folder = Path("runs") / run / "checkpoints" / str(step)
        workplace.bridge("export", "--to", "hf", str(folder), "--out", f"export-{run}")
        exports[run] = load_file(workplace.folder / f"export-{run}" / "model.safetensors")
    base = load_file(workplace.folder / "hf" / "model.safetensors")
    assert exports["one"].keys() == exports["two"].keys() == base.keys()
    for name, value in exports["one"].items():
        moved = np.abs(value.astype(np.float64) - base[name]).max()
        apart = np.abs(value.astype(np.float64) - exports["two"][name]).max()
        assert apart < 0.02 * moved, name


@pytest.mark.slow
def test_tunix_lora_on_two_processes(tunix: Workplace) -> None:
    workplace = tunix
    steps = ("train.steps=6", "train.save_every=3")
    workplace.bridge("launch", "lora", *steps, "train.batch_per_device=4", "--run", "one")
    # As torchrun starts them: the same command once a process.
    place = {"MASTER_ADDR": socket.gethostname(), "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    place["LOCAL_WORLD_SIZE"] = "2"
    both = [workplace.start("launch", "lora", *steps, "--run", "two", RANK=str(rank), **place) for rank in range(2)]
    for popen in both:
        text, _ = popen.communicate(timeout=600)
        assert popen.returncode == 0, text
    one, two = workplace.losses("one"), workplace.losses("two")
    assert sorted(one) == sorted(two) == list(range(1, 7))
    # The base is bfloat16: one part in 256, and its sums are added in another order.
    np.testing.assert_allclose([two[k] for k in sorted(two)], [one[k] for k in sorted(one)], rtol=4e-3)
    assert two[6] < two[1]
    workplace.bridge("export", "--to", "peft", "runs/two/checkpoints/6", "--out", "adapter")
    assert (workplace.folder / "adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_tunix_lora_killed_and_resumed(tunix: Workplace) -> None:
    lora = ("launch", "lora", "train.save_every=3")
    kill_one(tunix, (*lora, "train.steps=2000", "--processes", "2", "--run", "killed"), after=4, run="killed")
    saved, before = newest(tunix, "killed"), len(tunix.steps("killed"))
    assert saved >= 3
    last = saved + 2
    text = tunix.bridge(*lora, f"train.steps={last}", "--processes", "2", "--run", "killed", "--resume")
    assert f"resuming killed at step {saved} of {last}" in text
    assert tunix.steps("killed")[before:] == [saved + 1, last]
    tunix.bridge(*lora, f"train.steps={last}", "train.batch_per_device=4", "--run", "whole")
    whole, killed = tunix.losses("whole"), tunix.losses("killed")
    both = [step for step in sorted(whole) if step <= last]
    assert both == list(range(1, last + 1))
    # As above; what a resume loses or repeats would show in the last two.
    np.testing.assert_allclose([killed[k] for k in both], [whole[k] for k in both], rtol=4e-3)


def test_a_busy_port_is_an_error_at_once(maxtext: Workplace) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        start = time.monotonic()
        text = maxtext.bridge(
            "launch", "sft", "train.steps=1", f"cluster.port={port}", "--processes", "2", "--run", "busy", code=1
        )
    assert f"port {port} on {socket.gethostname()} cannot be used: Address already in use" in text
    assert time.monotonic() - start < 60


def test_one_of_two_is_an_error_within_its_bound(maxtext: Workplace) -> None:
    """As torchrun would start the first of two, and nobody the second."""
    place = {"MASTER_ADDR": socket.gethostname(), "WORLD_SIZE": "2", "RANK": "0"}
    arguments = ("launch", "sft", "train.steps=1", "cluster.init_timeout=2", "--run", "alone")
    text = maxtext.bridge(*arguments, code=1, **place)
    assert "1 of 2 joined within 2 s: process 1 missing" in text
    assert not (maxtext.folder / "runs" / "alone" / "checkpoints").exists()


def test_an_unknown_flag_starts_nothing(maxtext: Workplace) -> None:
    text = maxtext.bridge("launch", "sft", "cluster.xla_flags=[--xla_no_such=1]", "--run", "flag", code=1)
    assert "XLA does not know these flags\n  --xla_no_such=1" in text
    assert not (maxtext.folder / "runs" / "flag").exists()


def test_both_names_of_the_memory_fraction_start_nothing(maxtext: Workplace) -> None:
    old = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9"}
    text = maxtext.bridge("launch", "sft", "cluster.memory_fraction=0.5", "--run", "memory", code=1, **old)
    assert "XLA_CLIENT_MEM_FRACTION=0.5 and its old name XLA_PYTHON_CLIENT_MEM_FRACTION=0.9 are both set" in text
    assert not (maxtext.folder / "runs" / "memory").exists()


def test_nothing_is_left_running(maxtext: Workplace) -> None:
    assert wait_for(lambda: not left_of(maxtext.folder), 10)


def left_of(folder: Path) -> list[int]:
    """Processes whose command names a folder."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                command = (path / "cmdline").read_bytes()
            except OSError:
                continue
            if str(folder).encode() in command and int(path.name) != os.getpid():
                found.append(int(path.name))
    return found
