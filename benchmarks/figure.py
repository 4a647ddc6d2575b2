"""Draws the picture of the README from a results file of ``foredraft bench``.

python benchmarks/figure.py benchmarks/results/smollm2-135m.json docs/speedup.png

Where several N were tried, each bar is the fastest.
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import MaxNLocator

SERIES = (
    ("none", False, "bf16, plain", "#c9ced6"),
    ("none", True, "bf16, DFlash", "#6f9fd8"),
    ("mxfp4", False, "MXFP4, plain", "#9aa5b1"),
    ("mxfp4", True, "MXFP4, DFlash", "#2a7f62"),
)


def fastest(runs: list[dict], quantization: str, drafted: bool) -> dict[str, dict]:
    """The fastest run of each dataset."""
    found: dict[str, dict] = {}
    for run in runs:
        if run["quantization"] == quantization and (run["method"] != "none") == drafted:
            best = found.get(run["dataset"])
            if best is None or run["output_tokens_per_second"] > best["output_tokens_per_second"]:
                found[run["dataset"]] = run
    return found


def draw(results: dict, output: Path) -> None:
    """Left: tok/s by workload. Right: acceptance rate at each position, bf16 target, largest N tried."""
    runs = results["runs"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.2), layout="constrained")
    for place, (quantization, drafted, label, color) in enumerate(SERIES):
        chosen = fastest(runs, quantization, drafted)
        bars = left.bar(
            [index + 0.2 * (place - 1.5) for index in range(len(chosen))],
            [run["output_tokens_per_second"] for run in chosen.values()],
            0.2,
            label=label,
            color=color,
        )
        if drafted:
            left.bar_label(bars, [f"{run['speedup']:.2f}×" for run in chosen.values()], fontsize=7)
        left.set_xticks(range(len(chosen)), list(chosen))
    left.set_ylabel("output tokens per second")
    left.set_title("SmolLM2-135M, one request (over each bar: against plain of the same weights)", fontsize=10)
    left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=4, frameon=False)
    longest = max(run["num_speculative_tokens"] or 0 for run in runs)
    for run in runs:
        if run["num_speculative_tokens"] != longest or run["quantization"] != "none":
            continue
        rates = run["acceptance_rate_per_position"]
        label = f"{run['dataset']}  τ = {run['acceptance_length']:.2f}"
        right.plot(range(1, len(rates) + 1), rates, marker="o", label=label)
    right.set_xlabel("position in the proposal")
    right.set_ylabel("acceptance rate")
    right.set_ylim(0, 1)
    right.xaxis.set_major_locator(MaxNLocator(integer=True))
    right.set_title(f"Draft tokens kept, bf16, N = {longest}", fontsize=10)
    right.legend()
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(output, dpi=130)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
