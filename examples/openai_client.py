"""Talk to a running server with OpenAI's own client:   python examples/openai_client.py [base URL]"""

import sys

from openai import OpenAI

base_url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"

with OpenAI(base_url=base_url, api_key="not-needed") as client:
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "What is a KV cache?"}]

    answer = client.chat.completions.create(model=model, messages=messages, temperature=0)
    print(answer.choices[0].message.content)

    stream = client.chat.completions.create(model=model, messages=messages, temperature=0, stream=True)
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()
