"""BM25: scores by hand, and words of names in code."""

import math

from benchmarks.bm25 import places_by_bm25, words


def test_names_are_split_into_their_words():
    assert " ".join(words("def HTTPServer_close(self, x2): # Shut down")) == "def http server close self x 2 shut down"


def test_passages_are_ranked_by_rare_words_and_by_length():
    passages = ["a ship", "a ship and a ship", "an island", "the sea"]
    # query 0: both ships have the word; per word, f (k + 1) / (f + k (1 - b + b length / mean)), mean 11 / 4
    short = 1 * 2.2 / (1 + 1.2 * (0.25 + 0.75 * 2 / 2.75))
    long = 2 * 2.2 / (2 + 1.2 * (0.25 + 0.75 * 5 / 2.75))
    assert long < short
    assert places_by_bm25(["ship", "ship", "island sea", "sea ship"], passages).tolist() == [1, 2, 2, 1]
    of_ships, of_seas = math.log(1 + 2.5 / 2.5) * short, math.log(1 + 3.5 / 1.5) * 2.2 / (1 + 1.2 * (0.25 + 1.5 / 2.75))
    assert of_ships < of_seas, "a word of one passage counts more than one of two"


def test_a_passage_without_any_word_of_the_query_is_the_last():
    assert places_by_bm25(["whale"], ["ship", "sea"]).tolist() == [2]
