"""`bridge plan`."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from bridge import options
from bridge.commands import common
from bridge.commands.workspace import Workspace
from bridge.errors import BridgeError
from bridge.model_spec import ModelSpec
from bridge.options import Devices, Option


@click.command(epilog=common.examples("bridge plan --devices 8x80GB", "bridge plan --devices auto --json"))
@click.option("--devices", default="auto", show_default=True, help="1x24GB, 8x80GB, 2x8x80GB (hosts first), or auto.")
@common.spec_option
@common.json_option
def command(devices: str, spec: Path | None, as_json: bool) -> None:
    """Say what fits: memory on each device by method, mesh, the longest rows, and a recommendation.

    An estimate from shapes: nothing is loaded. `auto` counts the GPUs of this host.
    """
    workspace = Workspace.open(spec)
    model = model_of(workspace)
    there = local_devices() if devices == "auto" else options.parse_devices(devices)
    found = options.options(model, workspace.run, there)
    chosen = options.recommend(found, there)
    if as_json:
        common.emit(as_values(found, chosen, there))
    else:
        for line in lines(found, chosen, there, workspace.run.train.sequence_length):
            click.echo(line)


def model_of(workspace: Workspace) -> ModelSpec:
    """The model's facts: of a converted checkpoint where there is one, else of the model's folder."""
    from bridge import sidecar

    for engine in ("maxtext", "tunix"):
        facts = sidecar.read(workspace.converted(engine))
        if facts is not None:
            return facts.model
    return ModelSpec.from_folder(workspace.config_folder())


def local_devices() -> Devices:
    """The GPUs of this host.

    Raises:
        BridgeError: there are none, or they are not alike.
    """
    from bridge.commands.probing import nvidia

    seen = nvidia() if shutil.which("nvidia-smi") else None
    if seen is None or seen.error is not None:
        raise BridgeError("no GPU is found on this host", hint="say which devices: --devices 8x80GB")
    sizes = {int(float(device.split()[-2]) * (1 << 20)) for device in seen.devices}
    return Devices(1, len(seen.devices), min(sizes))


def as_values(found: tuple[Option, ...], chosen: Option | None, devices: Devices) -> dict[str, Any]:
    """The JSON object."""
    methods = [
        {
            "engine": option.engine,
            "method": option.method,
            "fits": option.fits,
            "bytes_per_device": option.memory.total if option.memory else None,
            "parts": asdict(option.memory) if option.memory else None,
            "mesh": asdict(option.mesh) if option.mesh else None,
            "longest_sequence": option.longest,
            "reason": option.reason,
        }
        for option in found
    ]
    best = {"engine": chosen.engine, "method": chosen.method, "reason": chosen.reason} if chosen else None
    return {"devices": asdict(devices), "methods": methods, "recommended": best}


def lines(found: tuple[Option, ...], chosen: Option | None, devices: Devices, length: int) -> list[str]:
    """For people: a row a method, then the recommendation."""
    shown = [
        f"{devices.count} x {common.gigabytes(devices.bytes)}, rows of {length} tokens; GB on each device, estimated "
        "from XLA's analysis for a CPU (docs/parity.md)",
        f"{'':14} {'fits':5} {'total':>7} {'weights':>8} {'optim.':>7} {'grads':>7} {'work':>7}  longest  reason",
    ]
    for option in found:
        name = f"{option.engine} {option.method}"
        if option.memory is None:
            shown.append(f"{name:14} {'no':5} {'-':>7} {'-':>8} {'-':>7} {'-':>7} {'-':>7} {'-':>8}  {option.reason}")
            continue
        m = option.memory
        work = m.total - m.parameters - m.reference - m.optimizer - m.gradients
        parts = [m.total, m.parameters + m.reference, m.optimizer, m.gradients, work]
        cells = [f"{part / 1e9:{width}.2f}" for part, width in zip(parts, (7, 8, 7, 7, 7), strict=True)]
        shown.append(
            f"{name:14} {'yes' if option.fits else 'no':5} {' '.join(cells)} {option.longest:8}  {option.reason}"
        )
    if chosen is None:
        return [*shown, "recommended: none of these fits; take more or larger devices, or a smaller model"]
    axes = chosen.mesh
    shape = f"mesh data {axes.data} x fsdp {axes.fsdp} x tensor {axes.tensor}" if axes else ""
    return [*shown, f"recommended: {chosen.engine} {chosen.method}, {shape}: {chosen.reason}"]
