"""Complete models: GPT, BERT and T5."""
