"""The precisions of training: formats, quantizers, and the engines that multiply in them."""
