"""Training text: prompts with the target's own answers, one JSON object a line.

Each line holds ``messages`` (the last one the assistant's answer) and ``token_ids`` of that answer; optional
``temperature`` and ``source``. ``foredraft synthesize`` writes such files.
"""

import gzip
import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from foredraft.errors import UserError
from foredraft.tokenizer import Tokenizer


@dataclass(frozen=True)
class Example:
    """One prompt with its answer. temperature: at which the target wrote the answer."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    temperature: float
    source: str

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt + self.answer


def load_examples(
    files: Sequence[Path], tokenizer: Tokenizer, max_answer_tokens: int, max_prompt_tokens: int
) -> list[Example]:
    """Read the files in order. Answers are cut, examples with a longer prompt or no room to draft are left out."""
    examples = []
    for file in files:
        for number, line in enumerate(text_lines(file), start=1):
            try:
                record = json.loads(line)
                messages = record["messages"]
                answer = tuple(int(token) for token in record["token_ids"][:max_answer_tokens])
                prompt = tuple(tokenizer.encode_chat(messages[:-1], add_generation_prompt=True))
                temperature = float(record.get("temperature", 0.0))
            except (KeyError, TypeError, ValueError, RecursionError) as error:
                raise UserError(
                    f"{file}, line {number}: expected an object with `messages` and `token_ids` ({error!r})"
                ) from error
            if answer and not 0 <= min(answer) <= max(answer) < tokenizer.vocab_size:
                raise UserError(f"{file}, line {number}: token ids of another vocabulary")
            if len(answer) >= 2 and len(prompt) <= max_prompt_tokens:
                examples.append(Example(prompt, answer, temperature, str(record.get("source", file.name))))
    if not examples:
        raise UserError(f"no usable examples in {', '.join(map(str, files))}")
    return examples


def split_held_out(examples: Sequence[Example], count: int) -> tuple[list[Example], list[Example]]:
    """Training and held-out examples. Which prompts are held out depends on the prompts alone."""

    def key(example: Example) -> bytes:
        return hashlib.sha256(str(example.prompt).encode()).digest()

    chosen = {key(example) for example in sorted(examples, key=key)[:count]}
    train = [example for example in examples if key(example) not in chosen]
    held_out = [example for example in examples if key(example) in chosen]
    if not train:
        raise UserError(f"{len(examples)} examples are too few to hold out {count}")
    return train, held_out


def frequent_tokens(examples: Sequence[Example], size: int, always: Sequence[int]) -> tuple[list[int], float]:
    """The ``size`` most frequent answer tokens, ids ascending, ``always`` among them, and the share they cover."""
    counts = Counter(token for example in examples for token in example.answer)
    ranked = [token for token, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]
    kept = list(dict.fromkeys([*always, *ranked]))[:size]
    covered = sum(counts[token] for token in kept) / counts.total()
    return sorted(kept), covered


def text_lines(file: Path) -> Iterator[str]:
    """Lines of a text file in UTF-8, decompressed where its name ends in .gz. Raises UserError."""
    try:
        with gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else file.open(encoding="utf-8") as opened:
            yield from opened
    except FileNotFoundError as error:
        raise UserError(f"{file} does not exist") from error
    except (OSError, UnicodeDecodeError, EOFError, zlib.error) as error:
        raise UserError(f"{file} cannot be read: {error}") from error
