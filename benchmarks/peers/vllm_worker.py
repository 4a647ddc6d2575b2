"""vLLM in its own Python environment: answers requests as ``worker.py`` does. Imports nothing of foredraft."""

import json
import os
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    state: dict[str, Any] = {}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = ANSWERS[request.pop("do")](state, **request)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


def open_target(state: dict[str, Any], model: str, max_model_len: int) -> dict[str, Any]:
    """Prefix caching is off because the same prompts come again in every turn."""
    import vllm

    state["llm"] = vllm.LLM(
        model, dtype="bfloat16", max_model_len=max_model_len, max_num_seqs=32, enable_prefix_caching=False
    )
    return {"version": vllm.__version__}


def generate(
    state: dict[str, Any], prompts: list[list[int]], max_tokens: int, ignore_eos: bool, together: bool
) -> dict[str, Any]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=ignore_eos)
    groups = [prompts] if together else [[prompt] for prompt in prompts]
    begin = perf_counter()
    outputs = [
        output
        for group in groups
        for output in state["llm"].generate([{"prompt_token_ids": prompt} for prompt in group], params, use_tqdm=False)
    ]
    seconds = perf_counter() - begin
    token_ids = [list(output.outputs[0].token_ids) for output in outputs]
    return {
        "seconds": seconds,
        "decode_seconds": seconds,
        "decoded": sum(len(tokens) for tokens in token_ids),
        "token_ids": token_ids,
    }


ANSWERS: dict[str, Callable[..., dict[str, Any]]] = {"open_target": open_target, "generate": generate}


if __name__ == "__main__":
    main()
