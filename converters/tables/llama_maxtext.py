"""Llama on MaxText 0.2.5: `LlamaDecoderLayer` under `decoder_block: llama2`, layers stacked on axis 1.

Source: maxtext/checkpoint_conversion/utils/param_mapping.py (`LLAMA31_MAXTEXT_TO_HF_PARAM_MAPPING` and its hooks)
and maxtext/models/llama2.py. Query and key heads are interleaved for `LLaMARotaryEmbedding`, which MaxText
takes under `rope_type: llama3.1`; a model without scaling keeps that layout and says `rope_use_scale: false`.
"""

from bridge.converters.layout import Rule, Table

LAYER = "model.layers.{layer}."
BLOCK = "decoder/layers/"

TABLE = Table(
    family="llama",
    engine="maxtext",
    item="items",
    prefix=("params", "params"),
    extra=(("step",),),
    unscanned_path=("decoder/layers/", "decoder/layers_{layer}/"),
    ignored=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"model\.rotary_emb\.inv_freq"),
    requires={
        "decoder_block": "llama2",
        "rope_type": "llama3.1",
        "mlp_activations": "['silu', 'linear']",
        "param_scan_axis": "1",
    },
    rules=(
        Rule("model.embed_tokens.weight", "token_embedder/embedding", "vocab embed -> vocab embed"),
        Rule(
            LAYER + "input_layernorm.weight",
            BLOCK + "pre_self_attention_layer_norm/scale",
            "layer embed -> embed layer",
        ),
        Rule(
            LAYER + "self_attn.q_proj.weight",
            BLOCK + "self_attention/query/kernel",
            "layer (heads two half) embed -> embed layer heads (half two)",
            scale="rsqrt_head_dim",
        ),
        Rule(
            LAYER + "self_attn.k_proj.weight",
            BLOCK + "self_attention/key/kernel",
            "layer (kv_heads two half) embed -> embed layer kv_heads (half two)",
        ),
        Rule(
            LAYER + "self_attn.v_proj.weight",
            BLOCK + "self_attention/value/kernel",
            "layer (kv_heads head_dim) embed -> embed layer kv_heads head_dim",
        ),
        Rule(
            LAYER + "self_attn.o_proj.weight",
            BLOCK + "self_attention/out/kernel",
            "layer embed (heads head_dim) -> heads layer head_dim embed",
        ),
        Rule(
            LAYER + "post_attention_layernorm.weight",
            BLOCK + "post_self_attention_layer_norm/scale",
            "layer embed -> embed layer",
        ),
        Rule(LAYER + "mlp.gate_proj.weight", BLOCK + "mlp/wi_0/kernel", "layer mlp embed -> embed layer mlp"),
        Rule(LAYER + "mlp.up_proj.weight", BLOCK + "mlp/wi_1/kernel", "layer mlp embed -> embed layer mlp"),
        Rule(LAYER + "mlp.down_proj.weight", BLOCK + "mlp/wo/kernel", "layer embed mlp -> mlp layer embed"),
        Rule("model.norm.weight", "decoder/decoder_norm/scale", "embed -> embed"),
        Rule("lm_head.weight", "decoder/logits_dense/kernel", "vocab embed -> embed vocab", when="untied"),
    ),
)
