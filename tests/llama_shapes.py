"""The published Llamas by their shapes, as their config.json have them: 3.2 1B and 3B, 3.1 8B, 70B and 405B."""

from __future__ import annotations

from dataclasses import replace

from bridge.model_spec import ModelSpec, RopeScaling

LLAMA_8B = ModelSpec(
    32, 4096, 32, 8, 128, 14336, 128256, False, 5e5, RopeScaling(8, 1, 4, 8192), 1e-5, 131072, "bfloat16"
)
LLAMA_1B = replace(LLAMA_8B, layers=16, embed=2048, head_dim=64, mlp=8192, tied=True)
LLAMA_3B = replace(LLAMA_8B, layers=28, embed=3072, heads=24, mlp=8192, tied=True)
LLAMA_70B = replace(LLAMA_8B, layers=80, embed=8192, heads=64, mlp=28672)
LLAMA_405B = replace(LLAMA_8B, layers=126, embed=16384, heads=128, mlp=53248)
