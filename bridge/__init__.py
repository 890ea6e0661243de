"""`bridge`: fine-tune Llama on JAX. Hugging Face in, MaxText or Tunix, Hugging Face out, proven."""

__version__ = "0.1.0"
