"""Runs made up by hand, for tests of what is made of them."""

from dataclasses import replace
from typing import Any

from foredraft.benchmark.results import Condition, Percentiles, Run


def made(method: str, n: Any, speedup: float | None, dataset: str = "gsm8k", **changes: Any) -> Run:
    condition = Condition(
        model="tiny",
        dtype="bfloat16",
        quantization="none",
        method=method,
        drafter=None,
        num_speculative_tokens=n,
        acceptance_rule="exact",
        dataset=dataset,
        dataset_source="data-dir",
        concurrency=1,
        max_tokens=8,
        temperature=0.0,
        seed=0,
    )
    return Run(
        condition=replace(condition, **changes),
        num_prompts=1,
        turns=1,
        output_tokens=8,
        seconds=1.0,
        output_tokens_per_second=8.0,
        ttft_ms=Percentiles(None, None),
        tpot_ms=Percentiles(None, None),
        rounds=4,
        acceptance_length=2.0 if dataset == "gsm8k" else 3.0,
        acceptance_rate_per_position=[],
        speedup=speedup,
        identical_to_plain=True,
        num_different=0,
        differences=[],
    )
