"""The Hugging Face model on packed documents: attention, layers, loss, gradients, sharding."""
