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


def open_target(
    state: dict[str, Any],
    model: str,
    max_model_len: int,
    speculative: dict[str, Any] | None = None,
    repair: bool = False,
) -> dict[str, Any]:
    """Prefix caching is off because the same prompts come again in every turn. With speculation nothing is compiled:
    it is run for what is accepted, not for its speed. repair: see ``normalize_by_layer``."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        interpret_triton()
    import vllm

    if repair:
        normalize_by_layer()

    state["llm"] = vllm.LLM(
        model,
        dtype="bfloat16",
        max_model_len=max_model_len,
        max_num_seqs=4 if speculative else 32,
        enable_prefix_caching=False,
        speculative_config=speculative,
        enforce_eager=speculative is not None,
        disable_log_stats=speculative is None,
    )
    return {"version": vllm.__version__}


def normalize_by_layer() -> None:
    """Normalise the keys that DFlash and DSpark compute from the context with each layer's own weights.

    vLLM hands them to one call for all layers, keys [L, T, H, D] and weights [L, D]. Its kernel for CPUs (0.32) takes
    the first layer's D weights for all of them.
    """
    from vllm import _custom_ops as ops
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    def normalized(self: Any, keys: Any) -> Any:
        out = keys.new_empty(keys.shape)
        for layer, weight in enumerate(self._k_norm_weights):
            ops.rms_norm(out[layer], keys[layer], weight, self._rms_norm_eps)
        return out

    DFlashQwen3Model._normalize_context_k = normalized


def interpret_triton() -> None:
    """Let vLLM take Triton's interpreter for a CPU backend.

    Its second model runner, the only one that knows DSpark, is written in Triton kernels; for those vLLM wants
    triton-cpu, which we found on no package registry. The interpreter runs them in NumPy: slow, and exact.
    """
    from triton.backends import backends

    backends["cpu"] = next(iter(backends.values()))


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


def generate_rounds(state: dict[str, Any], prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    """Greedy answers one after the other: of each the token ids, and how many of them each step brought."""
    from vllm import SamplingParams

    engine = state["llm"].llm_engine
    answers: list[dict[str, list[int]]] = []
    for prompt in prompts:
        state["requests"] = state.get("requests", 0) + 1
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        engine.add_request(str(state["requests"]), {"prompt_token_ids": prompt}, params)
        token_ids: list[int] = []
        steps: list[int] = []
        while engine.has_unfinished_requests():
            for output in engine.step():
                steps.append(len(output.outputs[0].token_ids) - len(token_ids))
                token_ids = list(output.outputs[0].token_ids)
        answers.append({"token_ids": token_ids, "steps": [count for count in steps if count]})
    return {"answers": answers}


def counters(state: dict[str, Any]) -> dict[str, Any]:
    """vLLM's own counters of speculation since it began."""
    found = {metric.name: metric for metric in state["llm"].get_metrics() if "spec_decode" in metric.name}
    return {name: getattr(metric, "values", None) or getattr(metric, "value", None) for name, metric in found.items()}


ANSWERS: dict[str, Callable[..., dict[str, Any]]] = {
    function.__name__: function for function in (open_target, generate, generate_rounds, counters)
}


if __name__ == "__main__":
    main()
