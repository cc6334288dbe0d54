"""Greedy accuracy of the embedded model per skill on held-out prompts; fails when a skill is under 95 %."""

import argparse
import json
import sys
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from cases import SKILLS, Case, held_out
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging

SHIPPED = Path(__file__).parents[2] / "raylm" / "models" / "embedded"
END = "<|im_end|>"
Generate = Callable[[list[str]], list[str]]


def prompt_of(case: Case, tokenizer: PreTrainedTokenizerBase) -> str:
    """The prompt as the chat template renders it."""
    return str(
        tokenizer.apply_chat_template(
            case.messages,
            tools=case.tools or None,
            add_generation_prompt=True,
            tokenize=False,
            enable_thinking=case.thinking,
        )
    )


def by_transformers(path: Path, tokenizer: PreTrainedTokenizerBase, batch: int, limit: int) -> Generate:
    """Greedy generation by transformers on the CPU in left-padded batches; the text includes the end token."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def generate(prompts: list[str]) -> list[str]:
        answers: dict[int, str] = {}
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        for start in range(0, len(order), batch):
            chosen = order[start : start + batch]
            inputs = tokenizer([prompts[i] for i in chosen], return_tensors="pt", padding=True, padding_side="left")
            with torch.inference_mode():
                out = model.generate(**inputs, do_sample=False, temperature=None, top_p=None, max_new_tokens=limit)
            for i, ids in zip(chosen, out[:, inputs["input_ids"].shape[1] :], strict=True):
                answers[i] = tokenizer.decode(ids).replace("<|endoftext|>", "")
        return [answers[i] for i in range(len(prompts))]

    return generate


def by_server(url: str, model: str, limit: int) -> Generate:
    """Greedy generation by an OpenAI server's /v1/completions, eight prompts at once."""

    def one(prompt: str) -> str:
        body = {"model": model, "prompt": prompt, "temperature": 0, "max_tokens": limit}
        request = urllib.request.Request(
            f"{url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as response:
            choice = json.load(response)["choices"][0]
        text = str(choice["text"]).removesuffix(END)
        return text + END if choice["finish_reason"] == "stop" else text

    def generate(prompts: list[str]) -> list[str]:
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(one, prompts))

    return generate


def score(skill: str, count: int, tokenizer: PreTrainedTokenizerBase, generate: Generate, show: int) -> float:
    """Share of right answers that also end; prints up to `show` wrong ones."""
    cases = held_out(skill, count, tokenizer.backend_tokenizer)
    answers = generate([prompt_of(case, tokenizer) for case in cases])
    right = 0
    for case, answer in zip(cases, answers, strict=True):
        good = answer.endswith(END) and case.right(answer.removesuffix(END))
        right += good
        if not good and show > 0:
            show -= 1
            print(f"    asked    {case.messages[-1]['content']!r}")
            print(f"    expected {case.expected!r}\n    answered {answer!r}")
    return right / len(cases)


def main() -> None:
    """Print the table; exit with 1 when a skill is under the bar."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=SHIPPED, help="directory of the checkpoint")
    parser.add_argument("--base-url", help="ask an OpenAI server instead, e.g. http://localhost:8000/v1")
    parser.add_argument("--served-name", default="embedded", help="the model's name on that server")
    parser.add_argument("--count", type=int, default=100, help="prompts per skill")
    parser.add_argument("--batch", type=int, default=50)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--bar", type=float, default=0.95)
    parser.add_argument("--show", type=int, default=0, help="wrong answers to print per skill")
    parser.add_argument("--skills", nargs="*", default=list(SKILLS))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    limit = 320
    if arguments.base_url:
        generate = by_server(arguments.base_url, arguments.served_name, limit)
    else:
        generate = by_transformers(arguments.model, tokenizer, arguments.batch, limit)
    low = []
    for skill in arguments.skills:
        began = time.time()
        share = score(skill, arguments.count, tokenizer, generate, arguments.show)
        low += [skill] * (share < arguments.bar)
        print(f"{skill:32} {100 * share:6.1f} %  {arguments.count} prompts  {time.time() - began:5.1f} s", flush=True)
    print(f"under {100 * arguments.bar:.0f} %: {', '.join(low) or 'none'}")
    sys.exit(1 if low else 0)


if __name__ == "__main__":
    main()
