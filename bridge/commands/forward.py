"""The engine's own forward pass on a checkpoint, for `verify` and `generate`."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge import rope
from bridge.run_spec import RunSpec

if TYPE_CHECKING:
    from bridge.commands.checkpoint import Checkpoint
    from bridge.converters.adapter_facts import AdapterFacts
    from bridge.converters.parity.compare import Forward


@contextlib.contextmanager
def forward_pass(found: Checkpoint, item: Path, longest: int) -> Iterator[Forward]:
    """From ids and positions, at most `longest` of them, to f32 logits of the tree in `item`.

    Args:
        found: whose model and engine it is.
        item: the checkpoint's own tree, or another of the same layout.
        longest: tokens of the longest input.
    """
    frequencies = rope.inverse_frequencies(found.model)
    if found.engine == "maxtext":
        from bridge.converters.parity import maxtext

        config = maxtext_config(found, item, {})
        with maxtext.forward_pass(config, item, longest, frequencies) as forward:
            yield forward
        return
    from bridge import engine_fixes, tunix_llama
    from bridge.converters.parity import tunix

    engine_fixes.apply("tunix", frequencies)
    llama = tunix_llama.load(found.model, item, "float32")
    yield lambda ids, positions: tunix.forward(llama, ids, positions)


def maxtext_config(found: Checkpoint, item: Path, sections: dict[str, Any]) -> str:
    """MaxText's YAML for a forward pass; `sections` are parts of a spec that matter to it."""
    from bridge import mesh
    from bridge.configs import maxtext as configs

    run = RunSpec.model_validate({"model": {"source": str(found.hf)}, **sections})
    place = configs.Place("verify", tempfile.gettempdir(), str(item), str(found.hf), found.tree.scanned, "cpu")
    return configs.render(run, found.model, mesh.Mesh(1, 1, 1), place)


@contextlib.contextmanager
def adapted_pass(found: Checkpoint, facts: AdapterFacts, base: Path, longest: int) -> Iterator[Forward]:
    """As `forward_pass`, of the base with the adapter on, as it was trained.

    Args:
        found: the adapter's checkpoint.
        facts: of the adapter.
        base: the converted base checkpoint's tree.
        longest: tokens of the longest input.
    """
    frequencies = rope.inverse_frequencies(found.model)
    if found.engine == "maxtext":
        from bridge.converters.parity import maxtext

        lora: dict[str, Any] = {"rank": facts.rank, "alpha": float(facts.alpha), "targets": facts.targets}
        if facts.tile_size is not None:
            lora["tile_size"] = facts.tile_size
        method = "qlora" if facts.quantization else "lora"
        config = maxtext_config(found, base, {"train": {"method": method}, "lora": lora})
        held = (facts.base_dtype or found.model.dtype) if facts.quantization else "float32"
        with maxtext.forward_pass(config, base, longest, frequencies, found.chosen.item, held) as forward:
            yield forward
        return
    from bridge import engine_fixes
    from bridge.converters.parity import tunix
    from bridge.launchers import tunix_adapters

    engine_fixes.apply("tunix", frequencies)
    adapters = tunix_adapters.Adapters(facts.rank, facts.alpha, facts.targets, facts.tile_size)
    # An adapter that was not trained by bridge is compared on its base as it is.
    dtype = facts.base_dtype or found.model.dtype
    llama = tunix_adapters.load_trained(found.model, base, found.chosen.item, adapters, dtype)
    yield lambda ids, positions: tunix.forward(llama, ids, positions)
