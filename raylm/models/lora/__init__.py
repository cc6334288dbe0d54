"""LoRA adapters: read from PEFT's files, and as layers multiply them."""
