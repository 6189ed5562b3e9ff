"""Conversations for supervised fine-tuning: records, rendered with a model's chat template, become tokens and rows."""
