"""The keys of a Llama `config.json`: sizes, what says nothing about the forward pass, what has one legal value."""

from __future__ import annotations

from typing import Any

# The keys that are sizes, with their names in `ModelSpec`.
SIZE_KEYS = {
    "vocab_size": "vocab",
    "hidden_size": "embed",
    "intermediate_size": "mlp",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
}

# Far above any model (405B: 126 layers, head_dim 128): a number typed by a fault or a foe must not fill the memory.
LIMITS = {"num_hidden_layers": 4096, "head_dim": 1 << 16}

# Keys of a Llama config.json that say nothing about the forward pass of the text model.
# Source: transformers/configuration_utils.py (PreTrainedConfig) and models/llama/configuration_llama.py.
# fmt: off
NEUTRAL_KEYS = frozenset({
    "architectures", "model_type", "_name_or_path", "transformers_version", "use_cache", "initializer_range",
    "torch_dtype", "dtype", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id",
    "decoder_start_token_id", "max_position_embeddings", "attention_dropout", "hidden_dropout",
    "pretraining_tp", "output_attentions", "output_hidden_states", "return_dict", "id2label", "label2id",
    "num_labels", "problem_type", "tokenizer_class", "prefix", "task_specific_params",
    "chunk_size_feed_forward", "auto_map", "_attn_implementation", "_attn_implementation_internal",
    "attn_implementation", "torchscript", "is_decoder", "is_encoder_decoder", "add_cross_attention",
    "cross_attention_hidden_size", "tie_encoder_decoder", "pruned_heads", "finetuning_task", "max_length",
    "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty",
    "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty",
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences",
    "output_scores", "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id",
    "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
    "tf_legacy_loss", "use_bfloat16", "transformers.js_config", "is_llama_config", "unsloth_version",
    "unsloth_fixed",
})
# fmt: on

# Keys that change the computation, and the only values under which it stays Llama's.
FIXED_KEYS: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "sliding_window": (None,),
    "use_sliding_window": (False, None),
    "layer_types": (None,),
    "logits_scaling": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "embedding_multiplier": (None, 1, 1.0),
    "attention_multiplier": (None,),
    "final_logit_softcapping": (None,),
    "attn_logit_softcapping": (None,),
    "partial_rotary_factor": (None, 1, 1.0),
    "qk_norm": (None, False),
    "use_qk_norm": (None, False),
    "num_local_experts": (None,),
    "num_experts": (None, 0),
    "quantization_config": (None,),
}
