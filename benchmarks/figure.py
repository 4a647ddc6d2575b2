"""Draws the picture of the README from a results file of ``foredraft bench``.

python benchmarks/figure.py benchmarks/results/smollm2-135m.json docs/speedup.png
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import MaxNLocator


def draw(results: dict, output: Path) -> None:
    """Left: tok/s of plain decoding and of DFlash by workload. Right: acceptance rate at each position."""
    runs = results["runs"]
    plain = {run["dataset"]: run for run in runs if run["method"] == "none"}
    drafted = {run["dataset"]: run for run in runs if run["method"] == "dflash"}
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    places = range(len(drafted))
    left.bar(
        [p - 0.2 for p in places],
        [plain[d]["output_tokens_per_second"] for d in drafted],
        0.4,
        label="plain",
        color="#9aa5b1",
    )
    bars = left.bar(
        [p + 0.2 for p in places],
        [run["output_tokens_per_second"] for run in drafted.values()],
        0.4,
        label="DFlash, same tokens",
        color="#2a7f62",
    )
    left.bar_label(bars, [f"{run['speedup']:.2f}×" for run in drafted.values()])
    left.set_xticks(places, drafted)
    left.set_ylabel("output tokens per second")
    left.set_title("SmolLM2-135M, one request")
    left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=2, frameon=False)
    for name, run in drafted.items():
        rates = run["acceptance_rate_per_position"]
        right.plot(range(1, len(rates) + 1), rates, marker="o", label=f"{name}  τ = {run['acceptance_length']:.2f}")
    right.set_xlabel("position in the proposal")
    right.set_ylabel("acceptance rate")
    right.set_ylim(0, 1)
    right.xaxis.set_major_locator(MaxNLocator(integer=True))
    right.set_title("Draft tokens kept")
    right.legend()
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(output, dpi=130)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
