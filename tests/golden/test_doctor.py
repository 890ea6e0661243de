"""What `bridge doctor` says of faked machines, to the letter, and that no fault goes unsaid."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from golden_types import Golden

from bridge.commands.doctor import as_values, lines
from bridge.doctor import Environment, Finding, Jax, Model, Nvidia, Requirement, examine

GPU = "NVIDIA H100 80GB HBM3"
SOUND = Environment(
    python=(3, 12, 4),
    packages={
        "jax": "0.12.0",
        "jaxlib": "0.12.0",
        "maxtext": "0.2.5",
        "google-tunix": "0.1.7",
        "jax-cuda12-plugin": None,
        "jax-cuda13-plugin": "0.12.0",
    },
    requirements=(
        Requirement("", "click", ">=8.1", "8.2.0", True),
        Requirement("maxtext", "grain", "", "0.2.1", True),
        Requirement("parity", "torch", "", "2.9.0", True),
    ),
    jax=Jax("gpu", (GPU,) * 8),
    nvidia=Nvidia("580.65.06", (f"{GPU} 81559 MiB",) * 8),
    memory=900 * 10**9,
    folder="/data",
    disk=4000 * 10**9,
    logged_in=True,
    host="node0",
    addresses=("10.0.0.1",),
    variables={"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_COMPILATION_CACHE_DIR": "/tmp/jax"},
    engine="maxtext",
    model=Model("meta-llama/Llama-3.1-8B", "hub", "ok", parameters=8030261248),
)
LAPTOP = replace(
    SOUND,
    packages={**SOUND.packages, "jax-cuda13-plugin": None},
    jax=Jax("cpu", ("cpu",)),
    nvidia=None,
    logged_in=False,
    host="laptop",
    addresses=("127.0.1.1",),
    engine=None,
    model=None,
)
BROKEN = replace(
    SOUND,
    python=(3, 11, 9),
    packages={**SOUND.packages, "maxtext": "0.3.0", "google-tunix": None},
    requirements=(
        *SOUND.requirements[:1],
        Requirement("maxtext", "grain", "", None, False),
        Requirement("parity", "transformers", "<5.13,>=5", "4.57.0", False),
    ),
    jax=Jax(error="RuntimeError: Unable to initialize backend 'cuda'"),
    nvidia=Nvidia("535.104", (f"{GPU} 81559 MiB",)),
    memory=2 * 10**9,
    disk=30 * 10**9,
    logged_in=False,
    addresses=(),
    variables={
        "XLA_CLIENT_MEM_FRACTION": ".9",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": ".8",
        "XLA_FLAGS": "--xla_nonsense=1",
        "M_STEPS": "5",
        "JAX_ENABLE_X64": "1",
    },
    unknown_flags=("--xla_nonsense=1",),
    spec_error="bridge.yaml: 1 problem(s); train.stepz: unknown key (did you mean steps?)",
    model=Model(
        "meta-llama/Llama-3.1-8B",
        "hub",
        "gated",
        page="https://huggingface.co/meta-llama/Llama-3.1-8B",
        parameters=8030261248,
    ),
)


@pytest.mark.parametrize(("name", "seen"), [("sound", SOUND), ("laptop", LAPTOP), ("broken", BROKEN)])
def test_faked_machines(name: str, seen: Environment, golden: Golden) -> None:
    findings = examine(seen)
    golden(f"doctor/{name}.txt", "\n".join(lines(findings)) + "\n")
    assert all((finding.fix is None) == (finding.level == "ok") for finding in findings)
    values = as_values(findings)
    assert values["ok"] == (name != "broken")
    assert [check["level"] for check in values["checks"]] == [finding.level for finding in findings]


def test_a_sound_machine_has_nothing_to_mend() -> None:
    assert {finding.level for finding in examine(SOUND)} == {"ok"}


OLD_DRIVER = {"nvidia": Nvidia("570.10", (GPU,))}
FAULTS: list[tuple[dict[str, Any], str, str, str]] = [
    ({"python": (3, 14, 0)}, "warning", "python", "uv venv --python 3.12"),
    ({"jax": Jax(error="it did not answer within 60 s"), "nvidia": None}, "error", "jax", "pip install --force"),
    ({"jax": Jax(error="no"), "variables": {"JAX_PLATFORMS": "tpu"}}, "error", "jax", "unset JAX_PLATFORMS"),
    (OLD_DRIVER, "error", "driver", "update the driver, or: pip install 'jax[cuda12]'"),
    ({"nvidia": Nvidia("470.1", (GPU,))}, "error", "driver", "update the driver"),
    ({"nvidia": Nvidia(error="it did not answer within 60 s")}, "error", "driver", "nvidia-smi"),
    ({"packages": {"jax": "0.12.0"}}, "error", "driver", "pip install 'bridge-llama[cuda]'"),
    (
        {"packages": {**SOUND.packages, "jax-cuda13-plugin": "0.11.0"}},
        "error",
        "driver",
        "pip install 'jax[cuda13]==0.12.0'",
    ),
    ({"packages": {**SOUND.packages, "jax-cuda12-plugin": "0.12.0"}}, "error", "driver", "pip uninstall"),
    ({"jax": Jax("cpu", ("cpu",))}, "error", "driver", "python -c"),
    ({"disk": 39 * 10**9}, "warning", "disk", "set workdir"),
    ({"memory": 10**9}, "warning", "memory", "close other programs"),
    ({"model": Model("a/b", "hub", "unreachable")}, "warning", "model", "HF_ENDPOINT"),
    ({"model": Model("a/b", "hub", "offline")}, "error", "model", "unset HF_HUB_OFFLINE"),
    ({"model": Model("a/b", "hub", "no revision", page="https://x/a/b")}, "error", "model", "https://x/a/b/commits"),
    ({"model": Model("models/x", "folder", "damaged", "it is truncated")}, "error", "model", "bridge inspect"),
    ({"variables": {"M_LEARNING_RATE": "1"}}, "warning", "variables", "unset M_LEARNING_RATE"),
    ({"variables": {"JAX_DISABLE_JIT": "1"}}, "warning", "variables", "unset JAX_DISABLE_JIT"),
    ({"addresses": ("127.0.0.1", "::1")}, "warning", "host", "cluster.coordinator"),
]


@pytest.mark.parametrize(("change", "level", "name", "fix"), FAULTS)
def test_each_fault_alone(change: dict[str, Any], level: str, name: str, fix: str) -> None:
    found = [finding for finding in examine(replace(SOUND, **change)) if finding.level == level]
    assert any(finding.name == name and fix in str(finding.fix) for finding in found), found


def test_another_version_of_an_engine_is_an_error_whichever_is_used() -> None:
    found = examine(replace(SOUND, packages={**SOUND.packages, "google-tunix": "0.2.0"}))
    text = "google-tunix 0.2.0; its corrections are tested with 0.1.7"
    assert Finding("error", "tunix", text, "pip install 'google-tunix==0.1.7'") in found
