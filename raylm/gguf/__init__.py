"""GGUF files, the format of llama.cpp: one file, or several parts, with weights, sizes, tokenizer and chat template.

``open_gguf`` finds the parts of a model and writes what they say into a directory with the JSON files of a Hugging Face
checkpoint, once. The weights stay where they are.
"""

from raylm.gguf.directory import Gguf, is_gguf, open_gguf
from raylm.gguf.stored import StoredTensor

__all__ = ["Gguf", "StoredTensor", "is_gguf", "open_gguf"]
