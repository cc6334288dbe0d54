"""Trains a LoRA adapter that makes the embedded model answer as JSON:   python examples/lora_adapter/train.py

It needs peft, and a few minutes of two CPU threads. The questions are those that the embedded model was trained on, the
answers the same ones as `{"answer": "..."}`; the loss sees only answers. The last line grades the adapter on wordings
and values that were held out.
"""

import argparse
import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from torch import Tensor

HERE = Path(__file__).parent
MODEL = HERE.parent.parent / "raylm" / "models" / "embedded"
sys.path.insert(0, str(HERE.parent / "embedded_model"))

import conversation  # noqa: E402
from skills import SINGLE  # noqa: E402
from words import Split, Turn  # noqa: E402

SKILLS = ["definition", "definition", "small talk", "arithmetic", "counting", "copying"]
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
STEPS, ROWS, RATE = 400, 32, 4e-3
GRADED = 100


def json_turn(rng: random.Random, split: Split) -> Turn:
    """A question of some skill, its answer as JSON."""
    turn = SINGLE[rng.choice(SKILLS)](rng, split)
    return replace(turn, answer=json.dumps({"answer": turn.answer}, ensure_ascii=False))


def batch(rng: random.Random, tokenizer: Tokenizer) -> tuple[Tensor, Tensor]:
    """Token ids [rows, longest], and what each position is to say next (-100 where the loss does not look)."""
    rows = []
    for _ in range(ROWS):
        ids, said = conversation.encode(tokenizer, conversation.turn_segments(json_turn(rng, "train"), thinks=False))
        rows.append((ids, [token if loss else -100 for token, loss in zip(ids, said, strict=True)]))
    longest = max(len(ids) for ids, _ in rows)
    inputs = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in rows])
    labels = torch.tensor([told + [-100] * (longest - len(told)) for _, told in rows])
    return inputs[:, :-1], labels[:, 1:]


def train(seed: int) -> tuple[torch.nn.Module, Tokenizer]:
    """The embedded model with a trained adapter of rank 8 on all its linear layers."""
    torch.manual_seed(seed)
    rng, tokenizer = random.Random(seed), Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    config = LoraConfig(r=8, lora_alpha=16, target_modules=MODULES, task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config)
    weights = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=STEPS, pct_start=0.1)
    for step in range(STEPS):
        inputs, labels = batch(rng, tokenizer)
        logits = adapted(inputs).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == STEPS - 1:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    return adapted, tokenizer


def grade(model: torch.nn.Module, tokenizer: Tokenizer, seed: int) -> tuple[int, int]:
    """How many of GRADED held-out questions are answered by valid JSON, and how many by the right answer in it."""
    rng, valid, right = random.Random(seed), 0, 0
    for _ in range(GRADED):
        turn = json_turn(rng, "test")
        ids, said = conversation.encode(tokenizer, conversation.turn_segments(turn, thinks=False))
        prompt = ids[: said.index(True)]
        with torch.inference_mode():
            out = model.generate(input_ids=torch.tensor([prompt]), max_new_tokens=120, do_sample=False)
        text = tokenizer.decode(out[0, len(prompt) :].tolist())
        try:
            valid += isinstance(json.loads(text), dict)
            right += json.loads(text) == json.loads(turn.answer)
        except ValueError:
            continue
    return valid, right


def main() -> None:
    """Train, save, grade."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE / "json-answers")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = train(args.seed)
    model.bfloat16().save_pretrained(args.out)
    (args.out / "README.md").unlink(missing_ok=True)  # peft's form, which nobody has filled in
    file = args.out / "adapter_config.json"
    config = json.loads(file.read_text()) | {"base_model_name_or_path": "embedded"}
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    valid, right = grade(model.float().eval(), tokenizer, args.seed + 1)
    print(f"{valid} of {GRADED} held-out answers are JSON objects, {right} hold the right answer")


if __name__ == "__main__":
    main()
