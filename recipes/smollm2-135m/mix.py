"""Answers to train on: a random part of a large file, and all of some small ones.

mix.py OUTPUT COUNT LARGE.jsonl[.gz] SMALL.jsonl ...
"""

import gzip
import random
import sys
from pathlib import Path


def lines(path: Path) -> list[str]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as opened:
        return list(opened)


def main() -> None:
    output, count, large, *small = sys.argv[1:]
    base = lines(Path(large))
    random.Random(5).shuffle(base)
    with Path(output).open("w") as out:
        out.writelines(base[: int(count)])
        for path in small:
            out.writelines(lines(Path(path)))


if __name__ == "__main__":
    main()
