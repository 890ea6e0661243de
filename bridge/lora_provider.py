"""Qwix's LoRA with f32 adapters on a narrower base, for both engines.

Qwix gives adapters the dtype of the base. In bfloat16 they lose what an optimizer adds to them: a step of 1e-4 on a
weight of 0.04 is rounded away or doubled. In f32 their product would widen every activation after it.
Source: qwix/_src/providers/lora.py, 0.1.8.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any


@functools.cache
def provider_class() -> Any:
    """Qwix's `LoraProvider` whose adapters may be wider than the activations."""
    import qwix

    class KeepsActivations(qwix.LoraProvider):  # type: ignore[misc]
        """The f32 product of the adapters is added in f32; the sum goes on in the dtype that came in."""

        def dot_general(self, lhs: Any, *args: Any, **kwargs: Any) -> Any:
            return _like(lhs, super().dot_general(lhs, *args, **kwargs), kwargs)

        def einsum(self, einsum_str: str, *operands: Any, **kwargs: Any) -> Any:
            return _like(operands[0], super().einsum(einsum_str, *operands, **kwargs), kwargs)

    return KeepsActivations


def like(provider: Any) -> Any:
    """A provider of `provider_class` with the rules of a `LoraProvider`."""
    # Qwix fills in what a rule leaves open, and refuses what it filled in itself.
    rules = [dataclasses.replace(rule, act_static_scale=None) for rule in provider._rules]
    return provider_class()(rules)


def _like(activations: Any, result: Any, options: dict[str, Any]) -> Any:
    return result if options.get("preferred_element_type") is not None else result.astype(activations.dtype)
