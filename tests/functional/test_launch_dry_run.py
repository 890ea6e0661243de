"""`bridge launch --dry-run`: one spelling for every kind of cluster; nothing is written, started or loaded for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hf_configs import changed

from bridge.cli import cli
from bridge.errors import BridgeError, LaunchError, SpecError

Dry = Callable[..., str]
SPEC = "model: {source: hf}\ndata: {train: train.jsonl}\n"
TOKEN = "hf_not_to_be_seen"
CLUSTER_NAMES = ("SLURM_", "OMPI_", "PMI_", "SKYPILOT_", "DSTACK_", "MASTER_", "WORLD_SIZE", "RANK", "CUDA_VISIBLE")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A spec and the config.json of Llama 3.1 8B: a plan needs no weights."""
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(changed()))
    (tmp_path / "bridge.yaml").write_text(SPEC)
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(CLUSTER_NAMES)]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return tmp_path


@pytest.fixture
def dry(project: Path, capsys: pytest.CaptureFixture[str]) -> Dry:
    """Runs it with arguments; what it prints, in which no token may stand. The folder must be as before."""

    def run(*arguments: str) -> str:
        before = sorted(project.rglob("*"))
        try:
            cli.main(["launch", "sft", "--run", "r", "--dry-run", *arguments], standalone_mode=False)
        finally:
            printed = capsys.readouterr()
        assert sorted(project.rglob("*")) == before
        assert TOKEN not in printed.out + printed.err
        return printed.out

    return run


@pytest.mark.parametrize("engine", ["maxtext", "tunix"])
def test_processes_of_this_host(dry: Dry, engine: str) -> None:
    text = dry("--engine", engine, "--processes", "2", "--devices", "4")
    lines = [line for line in text.splitlines() if "bridge.launchers.shim" in line]
    assert ["BRIDGE_PROCESS_ID=0" in lines[0], "BRIDGE_PROCESS_ID=1" in lines[1], len(lines)] == [True, True, 2]
    assert all("--xla_force_host_platform_device_count=2" in line and "BRIDGE_DEVICES=4" in line for line in lines)
    assert "ici_fsdp_parallelism: 4" in text or engine == "tunix"


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        (("--processes", "2", "--devices", "4"), ("cluster.processes=2", "cluster.devices=4")),
        (
            ("--launcher", "ssh", "--hosts", "hostA,ada@hostB", "--devices", "4"),
            ("cluster.launcher=ssh", "cluster.hosts=[hostA, ada@hostB]", "cluster.devices=4"),
        ),
        (("--launcher", "slurm", "--nodes", "4"), ("cluster.launcher=slurm", "cluster.nodes=4")),
    ],
)
def test_options_and_settings_are_one(dry: Dry, options: tuple[str, ...], settings: tuple[str, ...]) -> None:
    port = "cluster.port=50000"
    assert dry(port, *options) == dry(port, *settings)


def test_hosts_of_a_file(dry: Dry, project: Path) -> None:
    (project / "hosts").write_text("hostA\nada@hostB\n")
    text = dry("--launcher", "ssh", "--hosts", "hosts", "--devices", "2")
    assert text == dry("--launcher", "ssh", "--hosts", "hostA,ada@hostB", "--devices", "2")
    assert "# process 1 on ada@hostB" in text
    assert 'HF_TOKEN="$HF_TOKEN"' in text


def test_what_a_scheduler_is_given(dry: Dry, project: Path) -> None:
    script = dry("--launcher", "slurm", "--nodes", "2")
    assert script.startswith(f"# {project}/runs/r/job.sbatch\n#!/usr/bin/env bash\n")
    assert "--kill-on-bad-exit=1" in script
    jobset = f"cluster.jobset={{image: i, claim: w, mount: {project}, secret: hf}}"
    text = dry("--launcher", "jobset", "--nodes", "2", jobset)
    manifest, _, rest = text.partition(f"# {project}/runs/r/config.yml")
    assert yaml.safe_load(manifest)["kind"] == "JobSet"
    assert "base_config" in rest


def test_a_ready_made_environment(dry: Dry, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MASTER_ADDR": "head", "WORLD_SIZE": "4", "RANK": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    lines = [line for line in dry("--devices", "2").splitlines() if "bridge.launchers.shim" in line]
    assert len(lines) == 4
    assert all("BRIDGE_COORDINATOR=head:" in line and "BRIDGE_DEVICES=4" in line for line in lines)
    text = dry("--devices", "2", "cluster.environment=none")
    assert "BRIDGE_COORDINATOR" not in text


def test_gpus_by_their_names(dry: Dry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,6,7")
    text = dry("cluster.hardware=gpu", "--processes", "2")
    assert ["CUDA_VISIBLE_DEVICES=3,5 " in text, "CUDA_VISIBLE_DEVICES=6,7 " in text] == [True, True]
    with pytest.raises(LaunchError, match=r"cluster\.devices is 8, and this host has 4 GPUs to use: 3, 5, 6, 7"):
        dry("cluster.hardware=gpu", "--devices", "8")


@pytest.mark.parametrize(
    ("arguments", "kind", "says"),
    [
        (("--devices", "4", "mesh={fsdp: 3}"), SpecError, "fsdp 3 x tensor 1 does not make up 4 device(s)"),
        (("--nodes", "2"), LaunchError, "cluster.nodes is 2, and launcher: local is one host"),
        (("--launcher", "ssh", "--hosts", "localhost,b"), LaunchError, "the coordinator is localhost"),
        (("--processes", "3", "--devices", "4"), LaunchError, "4 devices of a node cannot be shared out"),
        (("--launcher", "slurm", "cluster.hardware=tpu"), LaunchError, "the tpu devices cannot be counted"),
        (("--launcher", "jobset"), LaunchError, "the settings do not make a JobSet"),
    ],
)
def test_refused_before_anything_starts(
    dry: Dry, arguments: tuple[str, ...], kind: type[BridgeError], says: str
) -> None:
    with pytest.raises(kind) as caught:
        dry(*arguments)
    assert says in str(caught.value)


PROGRAM = """
import sys
from bridge.cli import cli
cli.main(["launch", "sft", "--dry-run", "--engine", sys.argv[1]], standalone_mode=False)
heavy = {"jax", "jaxlib", "torch", "transformers", "orbax", "tensorstore", "datasets", "maxtext", "tunix", "flax"}
print(*sorted(heavy & set(sys.modules)), "loaded", file=sys.stderr)
"""


@pytest.mark.parametrize("engine", ["maxtext", "tunix"])
def test_the_launcher_loads_nothing_heavy(project: Path, engine: str) -> None:
    """It is there as long as the run, and starts before it: no engine, no JAX, and no PyTorch for RoPE's constants."""
    argv = [sys.executable, "-c", PROGRAM, engine]
    done = subprocess.run(argv, cwd=project, capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1].split() == ["loaded"]
