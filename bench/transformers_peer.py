"""Hugging Face transformers as a peer: a process that answers timed generation jobs, one JSON line each way.

Run with the same model directory, dtype and thread count as Baton. It stays loaded and idle between jobs, so that peer
and Baton can take turns in one run. Job: ``{"prompts": [[ids...], ...], "max_tokens": n}``.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def main(directory: str, threads: int) -> None:
    import torch
    import transformers  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    model.eval()
    print(json.dumps({"ready": True, "versions": [torch.__version__, transformers.__version__]}), flush=True)
    for line in sys.stdin:
        print(json.dumps(_answer(torch, model, json.loads(line))), flush=True)


def _answer(torch: Any, model: Any, job: dict[str, Any]) -> dict[str, Any]:
    """All prompts of a job have one length, so the batch needs no padding; EOS never ends it early."""
    prompts = torch.tensor(job["prompts"])
    length = job["max_tokens"]
    with torch.inference_mode():
        started = time.perf_counter()
        out = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=length,
            min_new_tokens=length,
            do_sample=False,
            pad_token_id=0,
        )
        seconds = time.perf_counter() - started
    return {"seconds": seconds, "tokens": out[:, prompts.shape[1] :].tolist()}


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
