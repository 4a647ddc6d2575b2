import gzip
import json

import pytest

from foredraft.errors import UserError
from foredraft.training.data import Example, frequent_tokens, load_examples, split_held_out


class LetterTokenizer:
    vocab_size = 200

    def encode_chat(self, messages, **_):
        return [ord(letter) for message in messages for letter in message["content"]]


def record(prompt="hi", answer=(1, 2, 3), **extra):
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": "?"}]
    return {"messages": messages, "token_ids": list(answer), **extra}


def write(path, records, opener=open):
    with opener(path, "wt") as file:
        file.writelines(json.dumps(entry) + "\n" for entry in records)
    return path


def test_answers_are_cut_and_unusable_examples_left_out(tmp_path):
    file = write(
        tmp_path / "a.jsonl",
        [
            record(answer=range(10), temperature=0.8, source="s"),
            record(prompt="much too long"),
            record(answer=[7]),
        ],
    )
    assert load_examples([file], LetterTokenizer(), 4, 5) == [Example((104, 105), (0, 1, 2, 3), 0.8, "s")]


def test_gzip_and_several_files(tmp_path):
    plain = write(tmp_path / "a.jsonl", [record(prompt="a")])
    packed = write(tmp_path / "b.jsonl.gz", [record(prompt="b")], gzip.open)
    assert [e.prompt for e in load_examples([plain, packed], LetterTokenizer(), 9, 9)] == [(97,), (98,)]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{broken", "line 1"),
        ('{"messages": []}', "token_ids"),
        (json.dumps(record(answer=[1, 999])), "another vocabulary"),
        (json.dumps(record(answer=[1, -1])), "another vocabulary"),
        (json.dumps(record(answer=[1, 2]) | {"temperature": "warm"}), "line 1"),
        ("", "no usable examples"),
    ],
)
def test_bad_files_are_named(tmp_path, content, says):
    file = tmp_path / "bad.jsonl"
    file.write_text(content)
    with pytest.raises(UserError, match=says):
        load_examples([file], LetterTokenizer(), 9, 9)


def test_missing_file_and_broken_gzip(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        load_examples([tmp_path / "none.jsonl"], LetterTokenizer(), 9, 9)
    broken = tmp_path / "x.gz"
    broken.write_bytes(b"not gzip")
    with pytest.raises(UserError, match="cannot be read"):
        load_examples([broken], LetterTokenizer(), 9, 9)


def test_held_out_depends_on_the_prompts_alone_and_shares_none():
    examples = [Example((i,), (1, 2), 0.0, "s") for i in range(50)] + [Example((3,), (5, 6), 0.8, "s")]
    train, held_out = split_held_out(examples, 10)
    assert not {e.prompt for e in train} & {e.prompt for e in held_out}
    assert len(train) + len(held_out) == len(examples)
    again = split_held_out(list(reversed(examples)), 10)[1]
    assert {e.prompt for e in again} == {e.prompt for e in held_out}


def test_frequent_tokens_are_ranked_and_keep_the_stop_tokens():
    examples = [Example((0,), (5, 5, 5, 9, 9, 7), 0.0, "s")]
    kept, share = frequent_tokens(examples, 3, [2])
    assert kept == [2, 5, 9]
    assert share == pytest.approx(5 / 6)
