"""The table of pages against a simple model of it: who owns what, what may be taken over, what goes first."""

from hashlib import blake2b

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.models.pages import OutOfPages, PageTable, page_contents


def test_pages_grow_up_to_the_limit_and_come_back() -> None:
    table = PageTable(4, limit=3)
    table.ensure(0, 5)
    assert table.owned(0) == 2 and table.missing(0, 9) == 1 and table.available == 1
    with pytest.raises(OutOfPages, match="2 pages are needed, 1 of 3 are left"):
        table.ensure(1, 8)
    assert table.owned(1) == 0
    table.release(0)
    table.ensure(1, 12)
    assert table.use.used == 3 and sorted(table.rows([1])[0]) == [0, 1, 2]


def test_without_a_limit_there_is_always_room() -> None:
    table = PageTable(4)
    table.ensure(7, 4000)
    assert table.owned(7) == 1000 and table.available == float("inf")


def test_a_beginning_is_taken_over_and_never_lost_while_in_use() -> None:
    table = PageTable(2, limit=4)
    contents = page_contents([1, 2, 3, 4, 5], 2)
    table.ensure(0, 5)
    for index, content in enumerate(contents):
        table.describe(0, index, content, complete=True)
    first = table.rows([0])[0].tolist()
    table.adopt(1, contents)
    assert table.rows([1])[0].tolist() == first[:2] and table.use.used == 3
    table.release(0)
    assert table.use.used == 2 and table.use.cached == 0
    table.release(1)
    assert table.use.used == 0 and table.use.cached == 2 and table.known(contents, True) == 2


def test_the_end_of_a_text_goes_before_its_beginning() -> None:
    table = PageTable(1, limit=4)
    contents = page_contents([1, 2, 3], 1)
    table.ensure(0, 3)
    for index, content in enumerate(contents):
        table.describe(0, index, content, complete=True)
    table.release(0)
    for end in (2, 3, 4):
        table.ensure(1, end)
        assert table.known(contents, True) == 4 - end


def test_a_complete_page_takes_the_place_of_one_that_is_not() -> None:
    table = PageTable(2, limit=4)
    (content,) = page_contents([1, 2], 2)
    table.ensure(0, 2)
    table.describe(0, 0, content, complete=False)
    table.release(0)
    assert table.known([content], complete=False) == 1 and table.known([content], complete=True) == 0
    table.ensure(1, 2)
    table.describe(1, 0, content, complete=True)
    assert table.known([content], complete=True) == 1 and table.use.cached == 0
    table.ensure(2, 2)
    table.describe(2, 0, content, complete=True)
    table.release(2)
    table.release(1)
    assert table.use.cached == 1 and table.available == 4


def test_contents_depend_on_all_tokens_up_to_a_pages_end() -> None:
    tokens = [5, 6, 7, 8, 9]
    contents = page_contents(tokens, 2)
    assert len(contents) == 2 and len(contents[0]) == 16
    assert page_contents(tokens, 2, contents[:1]) == contents
    assert page_contents([5, 6, 7, 0], 2)[0] == contents[0] != page_contents([0, 6], 2)[0]
    assert page_contents([0, 6, 7, 8], 2)[1] != contents[1]
    own = b"".join(token.to_bytes(8, "little") for token in (5, 6))
    assert contents[0] == blake2b(own, digest_size=16).digest()


steps = st.lists(
    st.tuples(st.sampled_from(["start", "grow", "grow", "leave"]), st.integers(0, 4), st.integers(0, 2), st.booleans()),
    max_size=60,
)


@settings(max_examples=200)
@given(steps, st.integers(3, 9))
def test_a_page_holds_what_its_slots_think(steps: list[tuple[str, int, int, bool]], limit: int) -> None:
    """Texts of slots share beginnings; what was written last into a page is what all its owners expect."""
    table = PageTable(2, limit=limit)
    texts: dict[int, list[int]] = {}
    written: dict[tuple[int, int], int] = {}
    for action, slot, letter, complete in steps:
        if action == "leave":
            table.release(slot)
            texts.pop(slot, None)
            continue
        if action == "start" and slot not in texts:
            wanted = [letter] * 4
            contents = page_contents(wanted, 2)
            known = table.known(contents, complete)
            if 2 - known + table.unused(contents[:known]) > table.available:
                continue
            table.adopt(slot, contents[:known])
            texts[slot], begin = wanted, 2 * known
        elif action == "grow" and slot in texts and table.missing(slot, len(texts[slot]) + 1) <= table.available:
            texts[slot], begin = [*texts[slot], letter], len(texts[slot])
        else:
            continue
        text = texts[slot]
        table.ensure(slot, len(text))
        row = table.rows([slot])[0]
        for place in range(begin, len(text)):
            written[int(row[place // 2]), place % 2] = text[place]
        for index, content in enumerate(page_contents(text, 2)):
            table.describe(slot, index, content, complete)
        for own, expected in texts.items():
            pages = table.rows([own])[0]
            assert [written[int(pages[place // 2]), place % 2] for place in range(len(expected))] == expected
        assert table.total <= limit and table.use.used + table.use.cached <= limit
    for slot in list(texts):
        table.release(slot)
    assert table.use.used == 0 and table.available == limit
