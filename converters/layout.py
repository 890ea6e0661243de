"""The mapping language: `Rule` and `Table`.

A rule is data. One einops-like string states the Hugging Face shape, the engine's shape and the move between
them; the inverse is the string flipped, so the two directions cannot disagree:

    Rule("model.layers.{layer}.self_attn.q_proj.weight", "decoder/layers/self_attention/query/kernel",
         "layer (heads two half) embed -> embed layer heads (half two)", scale="rsqrt_head_dim")

`layer` on the left stands for the tensors of all layers; on the right, for the axis that stacks them
(MaxText's scanned layers). A right side without `layer` has one array a layer. The first axis of the left side
after `layer` is the one that plans cut along: its rows are contiguous in a safetensors file.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from bridge.errors import TableError
from bridge.model_spec import ModelSpec

Axes = dict[str, int]
Groups = tuple[tuple[str, ...], ...]

LAYER = "layer"


def axes_of(model: ModelSpec) -> Axes:
    """The length of every named axis. `two` x `half` is a head split for RoPE."""
    return {
        LAYER: model.layers,
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "two": 2,
        "half": model.head_dim // 2,
        "embed": model.embed,
        "mlp": model.mlp,
        "vocab": model.vocab,
    }


def parse_side(text: str) -> Groups:
    """`'a (b c)'` -> `(('a',), ('b', 'c'))`.

    Raises:
        TableError: unbalanced brackets, or a word that is no axis name.
    """
    if not re.fullmatch(r"(\s*(\w+|\(\w+( \w+)*\)))+\s*", text):
        raise TableError(f"{text!r} is not a list of axes and (groups of axes)")
    return tuple(tuple(group.strip("()").split()) for group in re.findall(r"\([^)]*\)|\w+", text))


@dataclass(frozen=True)
class Rule:
    """One Hugging Face tensor a layer (or one in all) <-> one engine array, or its slice of it."""

    hf: str
    engine: str
    pattern: str
    scale: Literal["rsqrt_head_dim"] | None = None
    when: Literal["always", "untied"] = "always"

    def __post_init__(self) -> None:
        left, right = self.hf_groups, self.engine_groups
        flat_left, flat_right = [a for g in left for a in g], [a for g in right for a in g]
        if len(set(flat_left)) != len(flat_left) or len(set(flat_right)) != len(flat_right):
            raise TableError(f"{self.pattern!r}: an axis is named twice")
        if set(flat_left) - {LAYER} != set(flat_right) - {LAYER}:
            raise TableError(f"{self.pattern!r}: the two sides do not name the same axes")
        if (LAYER in flat_left) != ("{layer}" in self.hf):
            raise TableError(f"{self.hf}: {{layer}} in the name and `layer` in the pattern go together")
        if LAYER in flat_left and (LAYER in flat_right) == ("{layer}" in self.engine):
            raise TableError(f"{self.engine}: `layer` is either an axis or part of the name")
        if LAYER in flat_left and left[0] != (LAYER,):
            raise TableError(f"{self.pattern!r}: `layer` comes first")
        if (self.cut_axis,) not in right:
            raise TableError(f"{self.pattern!r}: {self.cut_axis}, which plans cut along, must stand alone on the right")

    @cached_property
    def _sides(self) -> tuple[Groups, Groups]:
        left, arrow, right = self.pattern.partition("->")
        if not arrow:
            raise TableError(f"{self.pattern!r} has no arrow")
        return parse_side(left), parse_side(right)

    @property
    def hf_groups(self) -> Groups:
        """The left side, `layer` included."""
        return self._sides[0]

    @property
    def engine_groups(self) -> Groups:
        """The right side, `layer` included where it is an axis."""
        return self._sides[1]

    @property
    def stacked(self) -> bool:
        """Whether the engine array holds all layers."""
        return (LAYER,) in self.engine_groups

    @property
    def per_layer(self) -> bool:
        """Whether there is one Hugging Face tensor a layer."""
        return "{layer}" in self.hf

    @property
    def cut_axis(self) -> str:
        """The axis that plans cut along."""
        return self.hf_groups[1 if self.hf_groups[0] == (LAYER,) else 0][0]

    @property
    def engine_cut_dim(self) -> int:
        """The dimension of the engine array that `cut_axis` is."""
        return self.engine_groups.index((self.cut_axis,))

    @property
    def engine_layer_dim(self) -> int | None:
        """The dimension of the engine array that stacks the layers."""
        return self.engine_groups.index((LAYER,)) if self.stacked else None

    @property
    def engine_embed_dim(self) -> int | None:
        """The dimension of the engine array that is the embedding, which fsdp shards."""
        return self.engine_groups.index(("embed",)) if ("embed",) in self.engine_groups else None

    def hf_shape(self, axes: Axes) -> tuple[int, ...]:
        """The shape of one Hugging Face tensor."""
        return _shape([group for group in self.hf_groups if group != (LAYER,)], axes)

    def engine_shape(self, axes: Axes) -> tuple[int, ...]:
        """The shape of the engine array."""
        return _shape(self.engine_groups, axes)

    def block(self, axes: Axes, units: int, parts: int = 1) -> Block:
        """The move of `units` steps along `cut_axis` of one Hugging Face tensor.

        With `parts` above 1 the embedding axis is split, and its parts come first on the engine's side: one stored
        chunk behind the other.
        """
        sizes = {**axes, self.cut_axis: units}
        left = [axis for group in self.hf_groups for axis in group if axis != LAYER]
        right_groups = [group for group in self.engine_groups if group != (LAYER,)]
        right = [axis for group in right_groups for axis in group]
        if parts > 1:
            sizes |= {"part": parts, "embed": sizes["embed"] // parts}
            left.insert(left.index("embed"), "part")
            right.insert(0, "part")
            right_groups = [("part",), *right_groups]
        return Block(
            hf_split=tuple(sizes[axis] for axis in left),
            order=tuple(left.index(axis) for axis in right),
            engine_shape=_shape(right_groups, sizes),
        )

    def unscanned(self, old: str, new: str) -> Rule:
        """The same rule with one array a layer: `layer` leaves the right side, `old` in the path becomes `new`."""
        if not self.stacked:
            return self
        left, _, right = self.pattern.partition("->")
        words = [word for word in right.split() if word != LAYER]
        return Rule(
            self.hf, self.engine.replace(old, new), f"{left.strip()} -> {' '.join(words)}", self.scale, self.when
        )


@dataclass(frozen=True)
class Block:
    """A permutation of one contiguous block: reshape to `hf_split`, transpose by `order`, reshape to `engine_shape`."""

    hf_split: tuple[int, ...]
    order: tuple[int, ...]
    engine_shape: tuple[int, ...]

    @property
    def engine_split(self) -> tuple[int, ...]:
        """`hf_split` in the engine's order."""
        return tuple(self.hf_split[i] for i in self.order)

    @property
    def inverse_order(self) -> tuple[int, ...]:
        """The transpose that undoes `order`."""
        return tuple(self.order.index(i) for i in range(len(self.order)))


@dataclass(frozen=True)
class Table:
    """All rules of a model family on an engine: the support matrix has one file a table."""

    family: str
    engine: str
    rules: tuple[Rule, ...]
    item: str
    """Folder of the tree inside a step: `<step>/<item>`."""
    prefix: tuple[str, ...] = ()
    suffix: tuple[str, ...] = ()
    unscanned_path: tuple[str, str] | None = None
    """What becomes of the path of stacked layers when they are not stacked."""
    extra: tuple[tuple[str, ...], ...] = ()
    """Scalars of the tree that are no weights, written as zeros (`step`)."""
    ignored: tuple[str, ...] = ()
    """Hugging Face tensors, as regular expressions, that hold nothing to convert (old RoPE buffers)."""
    requires: dict[str, str] = field(default_factory=dict)
    """Engine settings that the layout assumes; the config renderer emits them."""

    def rules_for(self, model: ModelSpec, scanned: bool) -> tuple[Rule, ...]:
        """The rules that apply to a model.

        Raises:
            TableError: unscanned layers were asked of a table that has none.
        """
        rules = tuple(rule for rule in self.rules if rule.when == "always" or not model.tied)
        if scanned or not any(rule.stacked for rule in rules):
            return rules
        if self.unscanned_path is None:
            raise TableError(f"{self.family} on {self.engine} has no unscanned layout")
        return tuple(rule.unscanned(*self.unscanned_path) for rule in rules)

    def engine_path(self, rule: Rule, layer: int | None) -> tuple[str, ...]:
        """The keys of an engine array in the checkpoint's tree."""
        path = rule.engine if layer is None else rule.engine.format(layer=layer)
        return (*self.prefix, *path.split("/"), *self.suffix)


def scale_of(rule: Rule, model: ModelSpec) -> float:
    """What Hugging Face values are multiplied with on the way in.

    MaxText folds 1/sqrt(head_dim) into the query kernel, rounded to float32
    (maxtext/checkpoint_conversion/utils/param_mapping.py, `scale_query_layer`).
    """
    if rule.scale is None:
        return 1.0
    import numpy as np

    return float(np.float32(1 / np.sqrt(model.head_dim)))


def _shape(groups: Groups | list[tuple[str, ...]], axes: Axes) -> tuple[int, ...]:
    return tuple(math.prod(axes[axis] for axis in group) for group in groups)
