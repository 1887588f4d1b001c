"""Decoder layers fused into few kernels, exact against the unfused model.

A layer of a Llama, Qwen or Mistral model becomes a norm with its stacked product, a rotation of queries and keys, an attention,
and a whole MLP, each with its own backward; parameters keep their Hugging Face names. Every piece has a plain form that runs on
any device, and where a GPU has a kernel of its own for it, that kernel is tested against the plain form.
"""
