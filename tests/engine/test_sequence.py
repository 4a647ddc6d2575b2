"""One sequence: how it ends, what its text is at every moment, and how its rounds are counted."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import EOS, MASK, TOKENS, tiny_tokenizer

from foredraft.engine.budget import draft_room
from foredraft.engine.sequence import Acceptance, Sequence
from foredraft.sampling_params import SamplingParams

TOKENIZER = tiny_tokenizer()
A, B, C, D = (TOKENS.index(token) for token in "abcd")
AB, BC, SPACE_A = TOKENS.index("ab"), TOKENS.index("bc"), TOKENS.index("Ġa")
E_ACUTE = (TOKENS.index("Ã"), TOKENS.index("©"))


def sequence(max_len: int = 100, prompt: int = 3, **params: Any) -> Sequence:
    return Sequence([B] * prompt, SamplingParams(**{"max_tokens": None, **params}), 5, max_len, (EOS,), TOKENIZER)


def fed(tokens: list[int], **params: Any) -> Sequence:
    """One token after another until the end; what is left over must not be taken."""
    made = sequence(**params)
    for token in tokens:
        if not made.finished:
            assert made.append([token], 0) == 1
    return made


def ending(made: Sequence) -> tuple[int, str, str | None, int | str | None]:
    return made.num_output, made.text, made.finish_reason, made.stop_reason


def test_lengths() -> None:
    made = sequence(max_tokens=2)
    assert (made.num_output, made.room, made.output, made.decoding, made.finished) == (0, 2, [], False, False)
    made.computed = 3
    assert made.append([A], 0) == 1
    assert (made.num_output, made.room, made.output, made.decoding, made.finished) == (1, 1, [A], True, False)
    made.append([C], 0)
    assert ending(made) == (2, "ac", "length", None)
    assert sequence(max_len=10, max_tokens=99).room == 7 and sequence(max_len=10).room == 7


@pytest.mark.parametrize(
    ("tokens", "params", "expected"),
    [
        ([A, EOS, B], {}, (2, "a", "stop", None)),
        ([A, EOS, B], {"ignore_eos": True, "max_tokens": 3}, (3, "ab", "length", None)),
        ([A, EOS], {"include_stop_str_in_output": True}, (2, "a", "stop", None)),
        ([A, EOS], {"include_stop_str_in_output": True, "skip_special_tokens": False}, (2, "a<eos>", "stop", None)),
        ([A, MASK, B], {"skip_special_tokens": False, "max_tokens": 3}, (3, "a<mask>b", "length", None)),
        ([A, C], {"stop_token_ids": [C]}, (2, "a", "stop", C)),
        ([A, C], {"stop_token_ids": [C], "include_stop_str_in_output": True}, (2, "ac", "stop", C)),
        ([A, C], {"stop_token_ids": [C], "max_tokens": 2}, (2, "a", "stop", C)),
        # stop strings: across tokens, inside one, the earliest of several, before a stop token's own reason
        ([A, B, C, D], {"stop": "bc"}, (3, "a", "stop", "bc")),
        ([A, BC, D], {"stop": "b"}, (2, "a", "stop", "b")),
        ([A, BC, D], {"stop": "b", "include_stop_str_in_output": True}, (2, "ab", "stop", "b")),
        ([A, BC, D], {"stop": ["c", "b"]}, (2, "a", "stop", "b")),
        ([A, BC], {"stop": ["bc", "b"]}, (2, "a", "stop", "bc")),
        ([C, AB, C], {"stop": "cabc"}, (3, "", "stop", "cabc")),
        ([A, SPACE_A, B], {"stop": " ab"}, (3, "a", "stop", " ab")),
        ([A, C], {"stop": "c", "max_tokens": 2}, (2, "a", "stop", "c")),
        ([A, C], {"stop": "c", "stop_token_ids": [C]}, (2, "a", "stop", C)),
        (
            [A, C],
            {"stop": "c", "stop_token_ids": [C], "include_stop_str_in_output": True},
            (2, "ac", "stop", "c"),
        ),
        # characters of several bytes: whole or U+FFFD, never half
        ([A, *E_ACUTE, B], {"max_tokens": 4}, (4, "aéb", "length", None)),
        ([A, *E_ACUTE, B], {"stop": "é"}, (3, "a", "stop", "é")),
        ([A, E_ACUTE[0]], {"max_tokens": 2}, (2, "a\ufffd", "length", None)),
        ([A, E_ACUTE[0], EOS], {}, (3, "a\ufffd", "stop", None)),
        ([A, E_ACUTE[0], B], {"max_tokens": 3}, (3, "a\ufffdb", "length", None)),
    ],
)
def test_endings(tokens: list[int], params: dict[str, Any], expected: tuple[Any, ...]) -> None:
    assert ending(fed(tokens, **params)) == expected


def test_min_tokens_holds_stop_strings_back() -> None:
    assert ending(fed([A, B, A, B], stop="b", min_tokens=2)) == (4, "aba", "stop", "b")
    assert ending(fed([A, B, A, B], stop="b", min_tokens=1)) == (2, "a", "stop", "b")


def test_a_stop_string_completed_within_min_tokens_is_past() -> None:
    """Even while a longer stop string keeps the text around it under observation."""
    made = fed([A, B, C, C, C, C], stop=["ab", "xxxxxx"], min_tokens=2, max_tokens=6)
    assert ending(made) == (6, "abcccc", "length", None)


def test_a_stop_string_across_min_tokens_counts() -> None:
    assert ending(fed([A, B, C], stop="abc", min_tokens=2)) == (3, "", "stop", "abc")


@pytest.mark.parametrize("cut", range(1, 6))
def test_a_run_is_its_tokens_one_by_one(cut: int) -> None:
    tokens = [A, B, EOS, C, D]
    made = sequence()
    first = made.append(tokens[:cut], cut - 1)
    assert first == min(cut, 3)
    if cut < 3:
        assert made.append(tokens[cut:], 0) == 3 - cut
    assert ending(made) == (3, "ab", "stop", None) and made.output == [A, B, EOS]
    assert made.origins == [index + 1 if index < cut - 1 else 0 for index in range(3)]
    assert made.history.num_output_tokens == 3 and made.history.output_counts == {A: 1, B: 1, EOS: 1}


texts = st.lists(st.integers(0, len(TOKENS) - 1), min_size=1, max_size=25)


@given(texts, st.lists(st.text("abc. é", min_size=1, max_size=4), max_size=3), st.booleans(), st.integers(0, 6))
def test_settled_text_is_never_taken_back(tokens: list[int], stops: list[str], include: bool, low: int) -> None:
    made = sequence(stop=stops, include_stop_str_in_output=include, min_tokens=low, max_tokens=25)
    settled, sent = "", []
    for token in tokens:
        if made.finished:
            break
        made.append([token], 0)
        assert made.text[: made.settled_text].startswith(settled)
        sent += made.pieces(len(settled), made.settled_text)
        settled = made.text[: made.settled_text]
    assert "".join(piece for piece, _ in sent) == settled
    if made.finished:
        assert settled == made.text
    else:
        assert len(made.text) - len(settled) < max(map(len, stops), default=1)


@given(texts, st.lists(st.integers(0, 3), min_size=25, max_size=25), st.data())
def test_pieces_cut_the_text_where_tokens_meet(tokens: list[int], origins: list[int], data: st.DataObject) -> None:
    made = sequence(max_tokens=25, ignore_eos=True)
    for token, accepted in zip(tokens, origins, strict=False):
        made.append([token], min(accepted, 1))
    ends = [len(TOKENIZER.decode(tokens[: index + 1]).rstrip("\ufffd")) for index in range(len(tokens))]
    begin = data.draw(st.integers(0, len(made.text)))
    end = data.draw(st.integers(begin, len(made.text)))
    pieces = made.pieces(begin, end)
    assert "".join(piece for piece, _ in pieces) == made.text[begin:end] and all(piece for piece, _ in pieces)
    if "\ufffd" not in TOKENIZER.decode(tokens):
        # character by character: the token that completes it says where it came from
        owners = [next(i for i, stop in enumerate(ends) if at < stop) for at in range(len(made.text))]
        expected = [min(origins[owner], 1) for owner in owners]
        assert [origin for piece, origin in pieces for _ in piece] == expected[begin:end]


def test_aborting_keeps_what_is_there() -> None:
    made = sequence()
    made.append([A, B], 1)
    made.finish("abort")
    assert ending(made) == (2, "ab", "abort", None) and made.settled_text == 2


def test_without_a_tokenizer_there_are_tokens_only() -> None:
    made = Sequence([1], SamplingParams(stop="a", max_tokens=2), 0, 9, (), None)
    made.append([A, A], 0)
    assert ending(made) == (2, "", "length", None)


@pytest.mark.parametrize(("room", "expected"), [(1, 0), (2, 1), (5, 4), (6, 5), (99, 5)])
def test_draft_room_leaves_one_token_to_the_target(room: int, expected: int) -> None:
    assert draft_room(sequence(max_tokens=room), 5) == expected


def test_acceptance_counts() -> None:
    counted = Acceptance()
    assert (counted.length, counted.rates) == (1.0, [])
    counted.record(3, 2, 3)
    counted.record(1, 1, 2)
    counted.record(0, 0, 1)
    assert (counted.rounds, counted.committed, counted.proposed, counted.kept) == (3, 6, [2, 1, 1], [2, 1, 0])
    assert counted.length == 2.0 and counted.rates == [1.0, 1.0, 0.0]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12), st.integers(0, 12))
def test_acceptance_adds_up(rounds: list[tuple[int, int]], cut: int) -> None:
    whole, parts = Acceptance(), [Acceptance(), Acceptance()]
    for index, (proposed, kept) in enumerate(rounds):
        for counted in (whole, parts[index >= cut]):
            counted.record(proposed, min(kept, proposed), min(kept, proposed) + 1)
    parts[0].add(parts[1])
    assert parts[0] == whole
