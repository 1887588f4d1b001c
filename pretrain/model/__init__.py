"""The Hugging Face model on packed documents: attention, fused layers, the loss, and what is put around them."""
