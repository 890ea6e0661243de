"""Converted Tunix checkpoints of tiny models, for tests."""

from __future__ import annotations

from pathlib import Path

from bridge.converters.hf_store import HfSource
from bridge.converters.orbax_store import TreeSink
from bridge.converters.plan import check_hf, make_plan, table_for
from bridge.converters.transfer import import_checkpoint
from bridge.model_spec import ModelSpec


def convert(folder: Path, out: Path) -> Path:
    """Convert a Hugging Face folder and return the item, `<out>/0/model_params`."""
    model = ModelSpec.from_folder(folder)
    table = table_for(model, "tunix")
    plan = make_plan(table, model)
    sink = TreeSink(out / "0", table.item)
    with HfSource(folder) as source:
        check_hf(plan, source.headers, table, str(folder))
        import_checkpoint(plan, model, source, sink)
    sink.finish({})
    return sink.folder
