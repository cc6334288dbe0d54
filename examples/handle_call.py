"""Call a served model from Python, without HTTP, on the cluster that serves it:   python examples/handle_call.py

Any Ray program can do this: a batch job, another deployment, a notebook.
"""

import ray
from ray import serve

from raylm import SamplingParams

ray.init(address="auto", namespace="serve", log_to_driver=False, logging_level="warning")
handle = serve.get_app_handle("default").options(stream=True)

params = SamplingParams(temperature=0.0, max_tokens=64)
for output in handle.chat.remote([{"role": "user", "content": "What is a KV cache?"}], params):
    for delta in output.deltas:
        print(delta.text, end="", flush=True)
print()

token_ids = handle.options(stream=False).tokenize.remote("What is a KV cache?").result()
print(len(token_ids), "tokens")
