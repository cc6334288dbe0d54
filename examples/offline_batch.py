"""Generate for many prompts in one process, without a server:   python examples/offline_batch.py [model]"""

import sys

from raylm import LLM

QUESTIONS = ["What is 12 + 30?", "What is a KV cache?", "What is continuous batching?", "Count from 3 to 9."]


def main() -> None:
    """Ask everything at once; the engine batches."""
    with LLM(sys.argv[1] if len(sys.argv) > 1 else "embedded") as llm:
        results = llm.chat(QUESTIONS, temperature=0.0, max_tokens=64)
    for question, result in zip(QUESTIONS, results, strict=True):
        print(f"{question}\n    {result.text}")


if __name__ == "__main__":
    main()
