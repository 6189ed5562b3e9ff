"""class_names: how messages list the names of classes."""

from megalith.data.class_names import listed


def test_names_are_listed_and_quoted_where_a_comma_would_split_them():
    assert listed(["col, our", "num"]) == "'col, our', num"
    assert listed([]) == ""


def test_at_most_ten_names_are_listed():
    assert listed([str(n) for n in range(10)]) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9"
    assert listed([str(n) for n in range(1234)]) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 1,224 more"
