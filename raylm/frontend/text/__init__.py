"""Text and tokens: chat template, tokenizer, detokenizer, stop strings."""
