"""Where LoRA factors lie in an engine's checkpoint, derived from the table that says where the weights lie.

PEFT stores A as (rank, in) and B as (out, rank) for a weight (out, in). In the engine, A is the rule's input axes
and then the rank, B the rank and then the output axes: permuted as the weight is, and scaled where it is (B only).
Source: qwix/_src/providers/lora.py, 0.1.8: `einsum` keeps the axes apart (Tunix), `dot_general` joins them (MaxText).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from bridge.converters.adapter_facts import TARGETS, sort_targets
from bridge.converters.layout import LAYER, Axes, Block, Groups, Rule, axes_of, scale_of
from bridge.converters.plan import Tensor, table_for
from bridge.errors import CheckpointError, UnsupportedError
from bridge.model_spec import ModelSpec

RANK = "rank"
# The folder of the tree inside a step. MaxText looks for rank and alpha in the step's metadata only beside `items`.
ITEMS = {"tunix": "model_params", "maxtext": "items"}
# What MaxText's own training loop saves beside the adapters.
TRAINER_STATE = ("step", "opt_state", "nnx_aux")
PEFT_PREFIX = "base_model.model."
# Whether several axes become one axis of a factor.
JOINED = {"tunix": False, "maxtext": True}
TARGET_OF = re.compile(r"model\.layers\.\{layer\}\.(?:self_attn|mlp)\.(\w+)_proj\.weight")


@dataclass(frozen=True)
class Factor:
    """A or B of one target: one array a layer, or one for all layers."""

    target: str
    letter: str
    weight: str
    """The Hugging Face name of the adapted weight, `{layer}` in it."""
    engine: str
    hf_groups: Groups
    engine_groups: Groups
    """Without the layers."""
    layer_dim: int | None
    scale: float
    """What PEFT's values are multiplied with on the way in."""

    @property
    def hf(self) -> str:
        """The name of the tensor in a PEFT adapter, `{layer}` in it."""
        return f"{PEFT_PREFIX}{self.weight.removesuffix('.weight')}.lora_{self.letter}.weight"

    @property
    def rank_dim(self) -> int:
        """The dimension of the engine array that is the rank."""
        dim = 0 if self.letter == "B" else len(self.engine_groups) - 1
        return dim + 1 if self.layer_dim is not None and dim >= self.layer_dim else dim

    def hf_shape(self, axes: Axes) -> tuple[int, ...]:
        """The shape of the tensor in a PEFT adapter."""
        return _shape(self.hf_groups, axes)

    def block(self, axes: Axes) -> Block:
        """The move of one layer."""
        left = [axis for group in self.hf_groups for axis in group]
        right = [axis for group in self.engine_groups for axis in group]
        split = tuple(axes[axis] for axis in left)
        return Block(split, tuple(left.index(axis) for axis in right), _shape(self.engine_groups, axes))

    def engine_shape(self, axes: Axes) -> tuple[int, ...]:
        """The shape of the engine array, layers included where it stacks them."""
        shape = list(_shape(self.engine_groups, axes))
        if self.layer_dim is not None:
            shape.insert(self.layer_dim, axes[LAYER])
        return tuple(shape)


@dataclass(frozen=True)
class FactorArray:
    """One engine array of an adapter and the layers it holds."""

    factor: Factor
    path: tuple[str, ...]
    shape: tuple[int, ...]
    layers: tuple[int, ...]

    @property
    def name(self) -> str:
        """The array's name without the wrappers that checkpoints put around it."""
        return bare_name(self.path)

    def hf(self, layer: int) -> str:
        """The PEFT name of a layer."""
        return self.factor.hf.format(layer=layer)

    def weight(self, layer: int) -> str:
        """The Hugging Face name of the weight that is adapted."""
        return self.factor.weight.format(layer=layer)


def adapted_rules(model: ModelSpec, engine: str, scanned: bool) -> dict[str, Rule]:
    """The rule of every target, by target."""
    found = {}
    for rule in table_for(model, engine).rules_for(model, scanned):
        match = TARGET_OF.fullmatch(rule.hf)
        if match:
            found[match[1]] = rule
    return {target: found[target] for target in TARGETS}


def factors_of(target: str, rule: Rule, model: ModelSpec, joined: bool) -> tuple[Factor, Factor]:
    """A and B of a target, from the rule of its weight.

    Args:
        target: one of `TARGETS`.
        rule: of the weight; its left side is `layer out in`.
        model: gives the scale.
        joined: whether a factor has one axis where the weight has several.
    """
    outputs, inputs = (group for group in rule.hf_groups if group != (LAYER,))
    groups = [group for group in rule.engine_groups if group != (LAYER,)]
    sides = []
    for side in (inputs, outputs):
        mine = tuple(group for group in groups if set(group) <= set(side))
        sides.append((tuple(axis for group in mine for axis in group),) if joined else mine)
    rank: Groups = ((RANK,),)
    path, dim = rule.engine, rule.engine_layer_dim
    a = Factor(target, "A", rule.hf, f"{path}_lora_a", (*rank, inputs), (*sides[0], *rank), dim, 1.0)
    b = Factor(target, "B", rule.hf, f"{path}_lora_b", (outputs, *rank), (*rank, *sides[1]), dim, scale_of(rule, model))
    return a, b


def plan_adapter(
    model: ModelSpec, engine: str, scanned: bool, targets: tuple[str, ...], rank: int
) -> tuple[FactorArray, ...]:
    """Every array of an adapter's checkpoint: A then B, target by target.

    Raises:
        UnsupportedError: the engine has no adapters here.
    """
    if engine not in JOINED:
        raise UnsupportedError(f"adapters on {engine} are not supported", hint=f"supported: {', '.join(JOINED)}")
    rules, axes = adapted_rules(model, engine, scanned), {**axes_of(model), RANK: rank}
    arrays = []
    for target in targets:
        for factor in factors_of(target, rules[target], model, JOINED[engine]):
            shape, layers = factor.engine_shape(axes), tuple(range(model.layers))
            if factor.layer_dim is not None:
                arrays.append(FactorArray(factor, (*factor.engine.split("/"), "value"), shape, layers))
                continue
            for layer in layers:
                path = (*factor.engine.format(layer=layer).split("/"), "value")
                arrays.append(FactorArray(factor, path, shape, (layer,)))
    return tuple(arrays)


def measure(
    leaves: Mapping[tuple[str, ...], Tensor], model: ModelSpec, engine: str, scanned: bool, where: str
) -> tuple[int, tuple[str, ...]]:
    """Rank and targets of an adapter's checkpoint, as its arrays show them; nothing may be missing or left over.

    Args:
        leaves: what the checkpoint's metadata says of every array.
        model, engine, scanned: what the checkpoint should hold adapters of.
        where: of the checkpoint, for messages.

    Raises:
        CheckpointError: no adapters at all; a factor or a layer that is missing; arrays that are no factors of this
            model; ranks that differ; shapes that do not fit. All are listed.
    """
    found = {bare_name(path): tensor for path, tensor in leaves.items() if path[0] not in TRAINER_STATE}
    if not any(re.search(r"_lora_[ab]$", name) for name in found):
        raise CheckpointError(
            f"{where} holds no LoRA adapters, but {len(found)} other arrays",
            hint="is it a full checkpoint? then export it to hf without an adapter",
        )
    every = plan_adapter(model, engine, scanned, TARGETS, 1)
    known = {array.name: array for array in every}
    targets = tuple(sort_targets([known[name].factor.target for name in found if name in known]))
    ranks = {name: _rank_at(found[name].shape, known[name]) for name in found if name in known}
    most = max(ranks.values(), key=list(ranks.values()).count, default=1)
    problems = [f"unexpected   {name}  {found[name].shape}" for name in found if name not in known]
    problems += [f"rank         {name}  has rank {n}, others {most}" for name, n in ranks.items() if n != most]
    total = 0
    for array in plan_adapter(model, engine, scanned, targets, most):
        total += 1
        if array.name not in found:
            problems.append(f"missing      {array.name}  {array.shape}")
        elif ranks[array.name] == most and found[array.name].shape != array.shape:
            problems.append(f"shape        {array.name}  has {found[array.name].shape}, the model needs {array.shape}")
    if problems:
        layout = "with the layers stacked" if scanned else "with one array a layer"
        raise CheckpointError(
            f"{where} is no complete adapter of this model: {len(problems)} problem(s) in {total} arrays",
            details=problems,
            hint=f"read as {engine} {layout}" if engine == "maxtext" else None,
        )
    return most, targets


def bare_name(path: tuple[str, ...]) -> str:
    """`('decoder', ..., 'kernel_lora_a', 'value')` -> `decoder. ... .kernel_lora_a`, whichever wrappers are around."""
    keys = list(path)
    while keys and keys[0] == "params":
        keys.pop(0)
    if keys and keys[-1] == "value":
        keys.pop()
    return ".".join(keys)


def _rank_at(shape: tuple[int, ...], array: FactorArray) -> int:
    dim = array.factor.rank_dim
    return shape[dim] if dim < len(shape) else 0


def _shape(groups: Groups, axes: Axes) -> tuple[int, ...]:
    return tuple(math.prod(axes[axis] for axis in group) for group in groups)
