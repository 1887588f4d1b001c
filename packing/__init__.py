"""Turn text into token ids, packs and batches: from files to the tensors of a training step."""
