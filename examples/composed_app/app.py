"""A shop's assistant: it finds the notes that fit a question, ranks them, and answers with a tool at hand.

    raylm serve examples/composed_app/serve.yaml
    curl localhost:8000/assistant/ask -H 'content-type: application/json' -d '{"question": "What is the stock of tea?"}'

The model is another application of the same file; it is called by handle, so prompts and answers never pass HTTP.
"""

import asyncio
import json
from functools import cached_property
from typing import Any

import numpy as np
from fastapi import FastAPI
from pydantic import BaseModel
from ray import serve

import raylm

NOTES = [
    "The shop is open from nine to six, and closed on Sunday.",
    "Tea and coffee are on the shelf beside the door.",
    "Bread is baked each morning before the shop opens.",
    "Returns are taken within thirty days, with the receipt.",
    "A parcel takes two days within the country.",
]
STOCK = {"tea": 12, "coffee": 0, "bread": 5}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_stock",
            "description": "How many pieces of an item there are",
            "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
        },
    }
]
NEAR, BEST = 3, 2  # notes that retrieval finds, and those of them that the model reads

api = FastAPI()


class Question(BaseModel):
    question: str


def run_tools(calls: list[Any]) -> list[dict[str, Any]]:
    """The messages that go on a conversation in which the model made these calls."""
    made, answers = [], []
    for call in calls:
        item = json.loads(call.arguments).get("item", "")
        answer = json.dumps({"item": item, "pieces": STOCK.get(item, 0)})
        made.append({"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}})
        answers.append({"role": "tool", "tool_call_id": call.id, "content": answer})
    return [{"role": "assistant", "tool_calls": made}, *answers]


@serve.deployment(ray_actor_options={"num_cpus": 0.1})
@serve.ingress(api)
class Assistant:
    def __init__(self) -> None:
        self.known: list[np.ndarray] = []

    @cached_property
    def llm(self) -> Any:
        return raylm.handle("default")  # when it is first asked for: the applications of a file start in any order

    async def vectors(self) -> "list[np.ndarray]":
        if not self.known:  # several first requests may each embed the notes; one that is cancelled leaves nothing
            self.known = await self.embed(NOTES)
        return self.known

    async def embed(self, texts: list[str]) -> "list[np.ndarray]":
        outputs = await asyncio.gather(*[self.llm.embed(text) for text in texts])
        return [np.frombuffer(output.vector, np.float32) for output in outputs]

    async def retrieve(self, question: str) -> list[str]:
        """The notes that fit, the best first."""
        (asked,) = await self.embed([question])
        scores = [float(asked @ vector) for vector in await self.vectors()]
        near = sorted(range(len(NOTES)), key=lambda place: -scores[place])[:NEAR]
        ranked = await self.llm.rerank(question, [NOTES[place] for place in near], top_n=BEST)
        return [result["document"]["text"] for result in ranked["results"]]

    @api.post("/ask")
    async def ask(self, body: Question) -> dict[str, Any]:
        notes = await self.retrieve(body.question)
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": "\n".join(notes)},
            {"role": "user", "content": body.question},
        ]
        answer = await self.chat(messages)
        if answer.tool_calls:
            messages += run_tools(answer.tool_calls)
            answer = await self.chat(messages)
        return {"answer": answer.text, "notes": notes, "messages": messages}

    async def chat(self, messages: list[dict[str, Any]]) -> Any:
        output = await self.llm.reply(messages, tools=TOOLS, temperature=0, max_tokens=100)
        return output.deltas[0]


app = Assistant.bind()
