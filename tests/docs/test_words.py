"""docs/adding.md: the table of the words in which methods describe themselves is what the code says."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import words_table


def test_the_table_of_words_is_what_the_code_says():
    page = words_table.PAGE.read_text()
    assert len(words_table.BLOCK.findall(page)) == 1
    assert words_table.with_table(page) == page, "run python tests/scripts/words_table.py"
    assert "`python tests/scripts/words_table.py`" in page


def test_there_are_at_most_forty_words():
    found = words_table.words()
    assert len({(word.kind, word.name) for word in found}) == len(found) <= 40


def test_somebody_says_each_word_and_somebody_hears_it():
    said, heard = words_table.said_and_heard()
    words = [(word.kind, word.name) for word in words_table.words()]
    assert [word for word in words if not said[word] or not heard[word]] == []
    # What one module says and one hears is a name in disguise; `branches` is of `mask` and of `partition`.
    alone = [word for word in words if len(said[word]) == len(heard[word]) == 1]
    assert alone == [("rule", "branches")]


def test_nobody_says_a_word_that_is_not_listed():
    words = {(word.kind, word.name) for word in words_table.words()}
    said, _ = words_table.said_and_heard()
    assert {word for word in said if word[0] in ("rule", "role", "state", "fact")} <= words
