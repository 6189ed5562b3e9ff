"""Text on its way to the model: indexed files, tokenizers, samples by formula; knows a rank and a world size."""
