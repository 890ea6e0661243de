"""The engine's own forward pass on a checkpoint, for `verify` and `generate`."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from bridge import rope
from bridge.run_spec import RunSpec

if TYPE_CHECKING:
    from bridge.commands.checkpoint import Checkpoint
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
        from bridge import mesh
        from bridge.configs import maxtext as configs
        from bridge.converters.parity import maxtext

        run = RunSpec.model_validate({"model": {"source": str(found.hf)}})
        place = configs.Place("verify", tempfile.gettempdir(), str(item), str(found.hf), found.tree.scanned, "cpu")
        config = configs.render(run, found.model, mesh.Mesh(1, 1, 1), place)
        with maxtext.forward_pass(config, item, longest, frequencies) as forward:
            yield forward
        return
    from bridge import engine_fixes, tunix_llama
    from bridge.converters.parity import tunix

    engine_fixes.apply("tunix", frequencies)
    llama = tunix_llama.load(found.model, item, "float32")
    yield lambda ids, positions: tunix.forward(llama, ids, positions)
