"""Llama on Tunix 0.1.7: one array a layer, no permutation of heads (half-split RoPE, as Hugging Face).

Source: tunix/models/llama3/params.py (`_get_key_and_transform_mapping`) and model.py.
"""

from bridge.converters.layout import Rule, Table

LAYER = "model.layers.{layer}."
BLOCK = "layers/{layer}/"

TABLE = Table(
    family="llama",
    engine="tunix",
    item="model_params",
    suffix=("value",),
    ignored=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"model\.rotary_emb\.inv_freq"),
    rules=(
        Rule("model.embed_tokens.weight", "embedder/input_embedding", "vocab embed -> vocab embed"),
        Rule(LAYER + "input_layernorm.weight", BLOCK + "input_layernorm/w", "layer embed -> embed"),
        Rule(
            LAYER + "self_attn.q_proj.weight",
            BLOCK + "attn/q_proj/w",
            "layer (heads head_dim) embed -> embed heads head_dim",
        ),
        Rule(
            LAYER + "self_attn.k_proj.weight",
            BLOCK + "attn/k_proj/w",
            "layer (kv_heads head_dim) embed -> embed kv_heads head_dim",
        ),
        Rule(
            LAYER + "self_attn.v_proj.weight",
            BLOCK + "attn/v_proj/w",
            "layer (kv_heads head_dim) embed -> embed kv_heads head_dim",
        ),
        Rule(
            LAYER + "self_attn.o_proj.weight",
            BLOCK + "attn/o_proj/w",
            "layer embed (heads head_dim) -> heads head_dim embed",
        ),
        Rule(LAYER + "post_attention_layernorm.weight", BLOCK + "post_attention_layernorm/w", "layer embed -> embed"),
        Rule(LAYER + "mlp.gate_proj.weight", BLOCK + "mlp/gate_proj/kernel", "layer mlp embed -> embed mlp"),
        Rule(LAYER + "mlp.up_proj.weight", BLOCK + "mlp/up_proj/kernel", "layer mlp embed -> embed mlp"),
        Rule(LAYER + "mlp.down_proj.weight", BLOCK + "mlp/down_proj/kernel", "layer embed mlp -> mlp embed"),
        Rule("model.norm.weight", "final_norm/w", "embed -> embed"),
        Rule("lm_head.weight", "lm_head/w", "vocab embed -> embed vocab", when="untied"),
    ),
)
