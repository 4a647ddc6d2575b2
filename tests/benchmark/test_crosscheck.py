"""What the cross-check makes of an engine's answers."""

import importlib.util
from pathlib import Path

FILE = Path(__file__).parents[2] / "benchmarks" / "crosscheck" / "compare.py"
spec = importlib.util.spec_from_file_location("crosscheck_compare", FILE)
assert spec and spec.loader
compare = importlib.util.module_from_spec(spec)
spec.loader.exec_module(compare)


def test_rounds_without_room_are_left_out_by_where_they_begin():
    # Rounds begin after 1, 4, 5 and 8 of 9 tokens; three drafts and one more need four.
    answer = compare.Answer(list(range(9)), [1, 3, 1, 3, 1])
    assert answer.kept == [2, 0, 2, 0]
    assert answer.full_rounds(3) == [True, True, True, False]
    assert compare.in_full_rounds([answer, answer], [answer.kept, [3, 3, 3, 3]], 3) == [2, 0, 2, 3, 3, 3]


def test_an_answer_ends_before_the_first_token_that_is_not_named():
    assert compare.Answer.known([5, 6, 7, None, 9], [1, 1, 2, 1]) == compare.Answer([5, 6], [1, 1])
    assert compare.Answer.known([], []) == compare.Answer([], [])
    assert compare.Answer.known([5, 6], [1, 1]) == compare.Answer([5, 6], [1, 1])


def test_figures_and_their_difference():
    one, other = compare.figures([0, 2, 1, 3], 3), compare.figures([0, 2, 2, 3], 3)
    assert one.acceptance_length == 2.5 and one.rates == [0.75, 0.5, 0.25]
    found = compare.difference(other, one)
    assert found.length == 2.75 / 2.5 - 1 and found.rate == 0.25 and not found.agrees
    assert compare.difference(one, one).agrees
    assert compare.figures([], 3).rates == [0, 0, 0]
