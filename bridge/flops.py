"""Model FLOPs of a training step and the peak of known devices: the two sides of model FLOP utilisation (MFU).

MFU is the model's own arithmetic a second over the devices' bfloat16 peak. What is computed twice (rematerialisation)
does not count; padding does, since it is computed. A token of a row of T tokens costs, with N the weights that it is
multiplied with (the seven projections of each layer and the head, tied or not; no embedding look-up, no norms) and
F = 2 x layers x heads x head_dim x T (attention forward: scores and values, half of them masked):

    full SFT, ORPO   6 N + 3 F        2 N forward, 2 N for the gradient of the inputs, 2 N for that of the weights
    LoRA, QLoRA      4 N + 6 A + 3 F  no gradient of the N frozen weights; A: the adapters' own
    DPO              as above, and 2 N + F for the reference's forward pass

Source of the accounting: PaLM (arXiv 2204.02311), appendix B, whose attention term 12 x layers x heads x head_dim x T
does not leave out the masked half; it is left out here, as MaxText does.
"""

from __future__ import annotations

from bridge.memory import adapter_parameters, projections
from bridge.model_spec import ModelSpec
from bridge.run_spec import RunSpec

A100 = (312.0, "NVIDIA A100 datasheet: 312 TFLOPS BFLOAT16 without sparsity")
H100_SXM = (989.5, "NVIDIA H100 datasheet, SXM: 1,979 TFLOPS BFLOAT16 with sparsity, half of it without")
H100_PCIE = (756.5, "NVIDIA H100 datasheet, PCIe: 1,513 TFLOPS BFLOAT16 with sparsity, half of it without")
H100_NVL = (835.5, "NVIDIA H100 datasheet, NVL: 1,671 TFLOPS BFLOAT16 with sparsity, half of it without")
H200_SXM = (989.5, "NVIDIA H200 datasheet, SXM: 1,979 TFLOPS BFLOAT16 with sparsity, half of it without")
H200_NVL = (835.5, "NVIDIA H200 datasheet, NVL: 1,671 TFLOPS BFLOAT16 with sparsity, half of it without")
L4 = (121.0, "NVIDIA L4 datasheet: 242 TFLOPS BFLOAT16 with sparsity, half of it without")
RTX_3090 = (71.0, "NVIDIA Ampere GA102 whitepaper, appendix A: 71 TFLOPS BF16 with FP32 accumulate, without sparsity")
RTX_4090 = (165.2, "NVIDIA Ada whitepaper, appendix A: 165.2 TFLOPS BF16 with FP32 accumulate, without sparsity")
TPU_V4 = (275.0, "Google Cloud, TPU v4: 275 TFLOPS bf16 a chip")
TPU_V5E = (197.0, "Google Cloud, TPU v5e: 197 TFLOPS bf16 a chip")
TPU_V5P = (459.0, "Google Cloud, TPU v5p: 459 TFLOPS bf16 a chip")
TPU_V6E = (918.0, "Google Cloud, TPU v6e: 918 TFLOPS bf16 a chip")

PEAKS = {
    "NVIDIA A100-SXM4-40GB": A100,
    "NVIDIA A100-SXM4-80GB": A100,
    "NVIDIA A100-PCIE-40GB": A100,
    "NVIDIA A100 80GB PCIe": A100,
    "NVIDIA H100 80GB HBM3": H100_SXM,
    "NVIDIA H100 PCIe": H100_PCIE,
    "NVIDIA H100 NVL": H100_NVL,
    "NVIDIA H200": H200_SXM,
    "NVIDIA H200 NVL": H200_NVL,
    "NVIDIA L4": L4,
    "NVIDIA GeForce RTX 3090": RTX_3090,
    "NVIDIA GeForce RTX 4090": RTX_4090,
    "TPU v4": TPU_V4,
    "TPU v5 lite": TPU_V5E,
    "TPU v5e": TPU_V5E,
    "TPU v5": TPU_V5P,
    "TPU v5p": TPU_V5P,
    "TPU v6 lite": TPU_V6E,
    "TPU v6e": TPU_V6E,
}
"""By JAX's `device_kind`, which is CUDA's name of a GPU: dense bfloat16 TFLOPS of one device, and who says so.

A name that is not here exactly (a laptop's, a slice of a GPU, a CPU) has no peak, and its runs no MFU.
"""


def peak(device_kind: str, devices: int, dtype: str) -> float | None:
    """FLOPs a second of so many devices at their best; None where it is not known, or the run is not in bfloat16."""
    if device_kind not in PEAKS or dtype != "bfloat16":
        return None
    return PEAKS[device_kind][0] * 1e12 * devices


def a_token(model: ModelSpec, run: RunSpec, length: int, adapters: bool) -> float:
    """Model FLOPs that one token of training costs.

    Args:
        model: the facts.
        run: its method, and the rank and targets of its adapters.
        length: tokens of a row; each attends to half of them on average.
        adapters: whether the run trains adapters on frozen weights.
    """
    weights = projections(model) + model.vocab * model.embed
    attention = 2 * model.layers * model.heads * model.head_dim * length
    trained = 4 * weights + 6 * adapter_parameters(model, run) if adapters else 6 * weights
    reference = 2 * weights + attention if run.train.method == "dpo" else 0
    return float(trained + 3 * attention + reference)
