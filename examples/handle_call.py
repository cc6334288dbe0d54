"""Call a served model from Python, without HTTP, on the cluster that serves it:   python examples/handle_call.py

Any Ray program can do this: a batch job, another deployment, a notebook. docs/handles.md says more.
"""

import ray

import raylm

ray.init(address="auto", namespace="serve", log_to_driver=False, logging_level="warning")
llm = raylm.handle("default")
messages = [{"role": "user", "content": "What is a KV cache?"}]

for output in llm.chat(messages, temperature=0, max_tokens=64):
    for delta in output.deltas:
        print(delta.text, end="", flush=True)
print()

answer = llm.reply(messages, temperature=0, max_tokens=64).result()
print(len(answer.deltas[0].token_ids), "tokens")
