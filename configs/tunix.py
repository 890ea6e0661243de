"""A Tunix program from a spec: about a page, readable, and run as it is by `python` or by `bridge launch`."""

from __future__ import annotations

import difflib
import json
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from bridge import engine_fixes, tunix_llama
from bridge.configs.render import header
from bridge.errors import SpecError
from bridge.model_spec import ModelSpec
from bridge.run_spec import RunSpec

VERSION = "0.1.7"
TITLES = {
    "sft": "Full supervised fine-tuning of a Llama",
    "lora": "LoRA fine-tuning of a Llama",
    "qlora": "QLoRA fine-tuning of a Llama: adapters on a base held in NF4",
    "dpo": "Direct preference optimization (DPO) of a Llama",
    "orpo": "Odds-ratio preference optimization (ORPO) of a Llama",
}
# The keys of `tunix:` in the spec, with what they may be. Everything else has its place in the other sections.
SETTINGS: dict[str, tuple[Any, ...]] = {"lora": (False, True), "remat": ("decoder", "block", "none")}


def render(
    run: RunSpec,
    model: ModelSpec,
    frequencies: Sequence[float],
    base_checkpoint: str,
    run_dir: str,
    tokenizer: str,
    folder: str = ".",
) -> str:
    """The program of a run. The same arguments give the same text.

    Args:
        run: the spec; its method is rendered. `tunix: {lora: true}` trains adapters in dpo and orpo.
        model: the facts.
        frequencies: `head_dim / 2` inverse RoPE frequencies, see `bridge.rope`.
        base_checkpoint: `<checkpoint>/0/model_params`, as `bridge convert --to tunix` writes it.
        run_dir: takes metrics, TensorBoard logs and checkpoints; must not hold the base checkpoint.
        tokenizer: a folder.
        folder: where relative paths of the data start.

    Raises:
        SpecError: an unknown key or value in `tunix:`.
        UnsupportedError: a model that NF4 tiles do not fit.
    """
    chosen = _settings(run)
    adapters = uses_adapters(run)
    if run.train.method == "qlora":
        tunix_llama.check_tiles(model, run.lora.tile_size)
    constants = [
        _comment("The model, from its config.json, and the RoPE frequencies that PyTorch has for it."),
        _call("MODEL", "runtime.model_facts", _facts(model)),
        _tuple("FREQUENCIES", frequencies),
        "",
        _comment("Where things lie. Relative paths of the data start at FOLDER."),
        f"CHECKPOINT = {_value(base_checkpoint)}",
        f"TOKENIZER = {_value(tokenizer)}",
        f"FOLDER = {_value(folder)}",
        f"RUN_DIR = {_value(run_dir)}",
        "",
        _comment("What to do: the keys of bridge.yaml, checked in the same way."),
        _call("SETTINGS", "runtime.settings", _sections(run, adapters)),
        f'REMAT = "{chosen["remat"]}"  # computed again in the backward pass: each decoder layer, each block, or none',
    ]
    return "\n".join([_head(run), *constants, "", "", _main(adapters)])


def uses_adapters(run: RunSpec) -> bool:
    """Whether a run trains adapters: lora, qlora, and dpo or orpo with `tunix: {lora: true}`."""
    return run.train.method in ("lora", "qlora") or (run.train.method != "sft" and _settings(run)["lora"])


def _settings(run: RunSpec) -> dict[str, Any]:
    problems = []
    for key, value in run.tunix.items():
        if key not in SETTINGS:
            close = difflib.get_close_matches(key, SETTINGS, n=1)
            known = f"did you mean {close[0]}?" if close else f"known: {', '.join(SETTINGS)}"
            problems.append(f"tunix.{key}: unknown key ({known})")
        elif not any(value is allowed or (isinstance(allowed, str) and value == allowed) for allowed in SETTINGS[key]):
            problems.append(f"tunix.{key}: {value!r} (supported: {', '.join(map(str, SETTINGS[key]))})")
    if run.train.method == "sft" and run.tunix.get("lora") is True:
        problems.append("tunix.lora: true with the method sft; the method lora is what it means")
    if problems:
        raise SpecError(f"tunix: {len(problems)} problem(s)", details=problems)
    return {key: allowed[0] for key, allowed in SETTINGS.items()} | run.tunix


def _head(run: RunSpec) -> str:
    lines = [
        f"{TITLES[run.train.method]}.",
        "Run it with `python`, or through `bridge launch`; edit it as you like.",
        "",
        f"`runtime.correct` corrects Tunix {VERSION}, and stops on a version that it was not written for:",
    ]
    for fix in engine_fixes.fixes():
        if fix.engine == "tunix":
            lines += textwrap.wrap(f"{fix.name}: {fix.reason}.", 116, initial_indent="- ", subsequent_indent="  ")
    return header("tunix", VERSION, *lines).replace("# \n", "#\n") + (
        "from bridge.launchers import tunix_runtime as runtime\n"
    )


def _main(adapters: bool) -> str:
    check = "    runtime.check(SETTINGS, MODEL, CHECKPOINT)"
    build = "runtime.full_model(SETTINGS, MODEL, CHECKPOINT, mesh, REMAT)"
    if adapters:
        check = "    adapters = runtime.adapters(SETTINGS)\n    runtime.check(SETTINGS, MODEL, CHECKPOINT, adapters)"
        build = "runtime.adapted_model(SETTINGS, MODEL, CHECKPOINT, mesh, REMAT, adapters)"
    return f"""\
def main() -> None:
    runtime.correct(FREQUENCIES)
{check}
    mesh = runtime.make_mesh(SETTINGS, MODEL)
    rows, eval_rows = runtime.read_data(SETTINGS, FOLDER, TOKENIZER)
    metrics = runtime.open_metrics(RUN_DIR)
    with mesh:  # not jax.set_mesh: Tunix would see no mesh, and leave everything on one device
        model = {build}
        optimizer = runtime.adamw(SETTINGS)
        trainer = runtime.make_trainer(SETTINGS, model, optimizer, RUN_DIR, metrics)
        runtime.train(SETTINGS, MODEL, trainer, rows, eval_rows, mesh, metrics)


if __name__ == "__main__":
    runtime.run_program(main)
"""


def _facts(model: ModelSpec) -> dict[str, Any]:
    facts = model.to_json()
    return {key: value for key, value in facts.items() if value is not None}


def _sections(run: RunSpec, adapters: bool) -> dict[str, Any]:
    spec = run.model_dump(mode="json")
    train = _without(spec["train"], "epochs") | {"steps": run.train.total_steps}
    train |= {"weight_dtype": _weights(run, adapters)}
    sections = {"data": _without(spec["data"], "prompts"), "train": train, "mesh": spec["mesh"]}
    if adapters:
        left_out = () if run.train.method == "qlora" else ("tile_size",)
        sections["lora"] = _without(spec["lora"], *left_out)
    if run.train.method in ("dpo", "orpo"):
        sections["preference"] = spec["preference"]
    return sections


def _without(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in names}


def _weights(run: RunSpec, adapters: bool) -> str:
    if run.train.weight_dtype != "auto":
        return run.train.weight_dtype
    return "bfloat16" if adapters else "float32"


def _comment(text: str) -> str:
    return f"# {text}"


def _call(name: str, function: str, arguments: Mapping[str, Any]) -> str:
    return f"{name} = {function}(\n" + "".join(f"    {key}={_value(v, 1)},\n" for key, v in arguments.items()) + ")"


def _tuple(name: str, numbers: Sequence[float]) -> str:
    text = ", ".join(map(repr, numbers)) + ","
    return f"{name} = (\n" + textwrap.fill(text, 116, initial_indent="    ", subsequent_indent="    ") + "\n)"


def _value(value: Any, depth: int = 0) -> str:
    """A Python literal, one key of a mapping a line; text in double quotes."""
    if isinstance(value, Mapping) and value:
        inner = "".join(f"{'    ' * (depth + 1)}{_value(k)}: {_value(v, depth + 1)},\n" for k, v in value.items())
        return f"{{\n{inner}{'    ' * depth}}}"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, tuple | list):
        items = ", ".join(_value(item, depth) for item in value)
        comma = "," if isinstance(value, tuple) and len(value) == 1 else ""
        return f"({items}{comma})" if isinstance(value, tuple) else f"[{items}]"
    return repr(value)
