"""Corrections of what a training step holds in memory, by Tunix 0.1.7's trainer, also MaxText's, and by qwix 0.1.8."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from bridge.engine_fixes import Fix, Frequencies

JIT_ARGUMENTS = ("self", "skip_jit", "cache_nnx_graph")
LOGPS_ARGUMENTS = (
    "model",
    "input_ids",
    "positions",
    "attention_mask",
    "logits_to_keep",
    "completion_mask",
    "images",
)
TOKEN_LOGPS_ARGUMENTS = ("model", "input_tokens", "positions", "attn_mask", "logits_to_keep", "images")
PRODUCT_ARGUMENTS = ("lhs", "rhs", "dimension_numbers", "kwargs")


class Step:
    """A step of a trainer, compiled: what it does not change goes in, and does not come out again.

    Attributes:
        jitted_fn: the compiled function (values to write, values to read, batch) -> (result, new values, changed ones).
    """

    def __init__(self, step: Callable[..., Any], nodes: Sequence[Any], filters: Sequence[Any], donate: bool) -> None:
        """Prepare; `nodes` are what `step` takes before the batch, `filters` say what it writes in each.

        Args:
            step: takes the nodes and a batch, writes into the nodes, returns a tree of arrays.
            nodes: the model, and for training the optimizer.
            filters: of each node, the nnx filter of its Variables that get new values at every step.
            donate: whether new values may lie where the old ones did; nothing else may use those arrays then.
        """
        import jax

        self._step, self._nodes, self._filters = step, nodes, filters
        # The states hold the nodes' own Variables, which keep their identity: split once, they are read at every step.
        self._graphs, self._states = self._split(nodes)
        leaves, self._trees = zip(*(jax.tree.flatten(part) for part in self._states), strict=True)
        kept = [_named_sharding(leaf) for leaf in leaves[0]]
        self.jitted_fn = jax.jit(self._pure, donate_argnums=(0,) if donate else (), out_shardings=(None, kept, None))

    def __call__(self, batch: Any) -> Any:
        """One step: the nodes have their new values afterwards."""
        from flax import nnx

        written, read = self.values()
        result, written, changed = self.jitted_fn(written, read, batch)
        states = [self._trees[0].unflatten(written)]
        if changed:
            states.append(self._trees[1].unflatten([changed.get(str(n), leaf) for n, leaf in enumerate(read)]))
        for state in states:
            for node, part in zip(self._nodes, state, strict=True):
                nnx.update(node, part)
        return result

    def values(self) -> tuple[list[Any], list[Any]]:
        """The arrays that the step writes, and those that it only reads."""
        import jax

        written, read = self._states
        return jax.tree.leaves(written), jax.tree.leaves(read)

    def _split(self, nodes: Sequence[Any]) -> tuple[list[Any], tuple[list[Any], list[Any]]]:
        from flax import nnx

        parts = [nnx.split(node, wanted, ...) for node, wanted in zip(nodes, self._filters, strict=True)]
        return [part[0] for part in parts], ([part[1] for part in parts], [part[2] for part in parts])

    def _pure(self, written: list[Any], read: list[Any], batch: Any) -> tuple[Any, list[Any], dict[str, Any]]:
        import jax
        from flax import nnx

        states = zip(
            *(tree.unflatten(part) for tree, part in zip(self._trees, (written, read), strict=True)), strict=True
        )
        nodes = [nnx.merge(graph, *parts) for graph, parts in zip(self._graphs, states, strict=True)]
        result = self._step(*nodes, batch)
        new, after = (jax.tree.leaves(part) for part in self._split(nodes)[1])
        # While tracing, an array that nobody wrote is the very same object.
        changed = {str(n): leaf for n, (leaf, old) in enumerate(zip(after, read, strict=True)) if leaf is not old}
        return result, new, changed


def _named_sharding(leaf: Any) -> Any:
    """Where new values lie, if the old ones are laid out on a mesh: the same place, or they could not be replaced."""
    import jax

    sharding = getattr(leaf, "sharding", None)
    return sharding if isinstance(sharding, jax.sharding.NamedSharding) else None


def steps(_: Frequencies) -> None:
    """Compile the steps of Tunix's trainer, and the reference of its DPO, without copying weights that they only read.

    Raises:
        AttributeError: Tunix is not as it was when this was written.
    """
    from tunix.rl import common
    from tunix.sft import peft_trainer
    from tunix.sft.dpo import dpo_trainer

    stock = peft_trainer.PeftTrainer.jit_train_and_eval_step
    if getattr(stock, "corrected", False):
        return
    _require_arguments(stock, JIT_ARGUMENTS)
    _require_arguments(dpo_trainer.compute_logps, LOGPS_ARGUMENTS)
    _require_arguments(common.get_per_token_logps, TOKEN_LOGPS_ARGUMENTS)
    if "nnx" not in stock.__code__.co_names:
        raise AttributeError("PeftTrainer no longer compiles its steps by nnx.jit")

    @functools.wraps(stock)
    def jit_train_and_eval_step(self: Any, skip_jit: bool = False, cache_nnx_graph: bool = False) -> tuple[Any, Any]:
        if skip_jit:
            stepping: tuple[Any, Any] = stock(self, skip_jit, cache_nnx_graph)
            return stepping
        if self._jitted_train_step_fn is None:
            self._shard_optimizer(peft_trainer.pxla.thread_resources.env.physical_mesh)
            # The trainer asks for the attribute `func` of what it calls.
            self._jitted_train_step_fn = functools.partial(train_step(self))
            self._jitted_eval_step_fn = functools.partial(
                Step(self.create_eval_step_fn(), [self.model], [False], donate=False)
            )
        return self._jitted_train_step_fn, self._jitted_eval_step_fn

    jit_train_and_eval_step.corrected = True  # type: ignore[attr-defined]
    peft_trainer.PeftTrainer.jit_train_and_eval_step = jit_train_and_eval_step
    dpo_trainer.compute_logps = _log_probabilities(inspect.unwrap(common.get_per_token_logps))


def train_step(trainer: Any) -> Step:
    """The compiled train step of a Tunix trainer: new weights take the place of the old ones where nobody shares them.

    MaxText's DPO makes its reference of the policy's own arrays.
    """
    import jax
    from flax import nnx

    trained = nnx.LoRAParam if trainer._lora_enabled else nnx.Param
    others = getattr(trainer, "ref_model", None)
    shared = {id(leaf) for leaf in jax.tree.leaves(nnx.state(others))} if others is not None else set()
    donate = not any(id(leaf) in shared for leaf in jax.tree.leaves(nnx.state(trainer.model, trained)))
    nodes = [trainer.model, trainer.optimizer]
    return Step(trainer.create_train_step_fn(), nodes, [trained, True], donate)


def _log_probabilities(token_log_probabilities: Any) -> Any:
    """Tunix's `compute_logps`: part of the step inside a compiled one; outside, compiled with the model as input alone.

    Args:
        token_log_probabilities: Tunix's `get_per_token_logps`, not compiled.
    """
    import jax
    from flax import nnx

    # By model and width; a Step holds its model, so that no other can have the same id.
    compiled: dict[tuple[int, int], Step] = {}

    def compute_logps(
        model: Any,
        input_ids: Any,
        positions: Any,
        attention_mask: Any,
        logits_to_keep: int,
        completion_mask: Any,
        images: Any = None,
    ) -> Any:
        """Sums of the log-probabilities of the chosen answers' tokens, and of the rejected ones': `[pairs]` each."""

        def sums(model: Any, batch: tuple[Any, ...]) -> tuple[Any, Any]:
            ids, positions, mask, completion, images = batch
            tokens = token_log_probabilities(model, ids, positions, mask, logits_to_keep, images)
            total = (tokens * completion).sum(axis=-1)
            half = total.shape[0] // 2
            return total[:half], total[half:]

        batch = (input_ids, positions, attention_mask, completion_mask, images)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((nnx.state(model), batch))):
            return sums(model, batch)
        key = (id(model), logits_to_keep)
        if key not in compiled:
            compiled[key] = Step(sums, [model], [False], donate=False)
        return compiled[key](batch)

    return compute_logps


def unpacking(_: Frequencies) -> None:
    """Unpack a quantized matrix where it is multiplied, forwards and again backwards, and keep only the packed one.

    Raises:
        AttributeError: qwix is not as it was when this was written.
    """
    from qwix._src.core import dot_general as core

    stock = core._slow_dot_general
    if getattr(stock, "corrected", False):
        return
    _require_arguments(stock, PRODUCT_ARGUMENTS)
    if "_slow_dot_general" not in core.dot_general.__code__.co_names:
        raise AttributeError("qwix's dot_general no longer calls _slow_dot_general")
    core._slow_dot_general = _unpacking_late(stock)


def _unpacking_late(stock: Any) -> Any:
    import jax
    from qwix._src.core import qarray

    @functools.wraps(stock)
    def product(lhs: Any, rhs: Any, dimension_numbers: Any, **kwargs: Any) -> Any:
        if isinstance(lhs, qarray.QArray) or not isinstance(rhs, qarray.QArray):
            return stock(lhs, rhs, dimension_numbers, **kwargs)
        packed, tree = jax.tree.flatten(rhs)

        def unpacked(after: Any, packed: Sequence[Any]) -> tuple[Any, Any]:
            # Without the barrier XLA may unpack every layer at the start, for it depends on no activations.
            after, *packed = jax.lax.optimization_barrier((after, *packed))
            return after, qarray.dequantize(jax.tree.unflatten(tree, packed))

        def forward(lhs: Any, *packed: Any) -> Any:
            lhs, matrix = unpacked(lhs, packed)
            return jax.lax.dot_general(lhs, matrix, dimension_numbers, **kwargs)

        def backward(packed: Sequence[Any], gradient: Any) -> tuple[Any, ...]:
            gradient, matrix = unpacked(gradient, packed)
            transposed = jax.linear_transpose(
                lambda lhs: jax.lax.dot_general(lhs, matrix, dimension_numbers, **kwargs),
                jax.ShapeDtypeStruct(lhs.shape, lhs.dtype),
            )
            return (*transposed(gradient), *(None for _ in packed))

        frozen = jax.custom_vjp(forward)
        frozen.defvjp(lambda lhs, *packed: (forward(lhs, *packed), packed), backward)
        return frozen(lhs, *packed)

    product.corrected = True  # type: ignore[attr-defined]
    return product


def _require_arguments(function: Any, expected: Sequence[str]) -> None:
    found = tuple(inspect.signature(function).parameters)
    if found != tuple(expected):
        raise AttributeError(f"{function.__qualname__} takes {found}, not {tuple(expected)}")


def _of(engine: str) -> tuple[Fix, ...]:
    return (
        Fix(
            name=f"{engine}-step-copies-nothing",
            engine=engine,
            reason="Tunix 0.1.7's trainer, MaxText's too, returns the whole model from every compiled step: a frozen "
            "base, and all weights at an evaluation, are copied and need room twice, and LoRA of 8B fits no 24 GB",
            proof="tests/parity/test_step_memory.py",
            install=steps,
        ),
        Fix(
            name=f"{engine}-nf4-one-layer-at-a-time",
            engine=engine,
            reason="qwix 0.1.8 lets XLA unpack the NF4 matrices of all layers before the first is used: 14 GB for 8B",
            proof="tests/parity/test_step_memory.py",
            install=unpacking,
        ),
    )


FIXES = (*_of("tunix"), *_of("maxtext"))
