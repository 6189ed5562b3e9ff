"""Mistakes in blending several datasets."""

from typing import Any

from tests.config.mistake import Mistake

__all__ = ["DATA_MISTAKES"]

TWO: dict[str, Any] = {"data.train": {"web": "a", "code": "b"}}
PHASE: dict[str, Any] = {"weights": {"web": 1, "code": 3}}
CLASSES: dict[str, Any] = {
    "model.bert.num_token_types": 2,
    "model.bert.head": "classification",
    "model.bert.num_classes": 3,
}

DATA_MISTAKES = [
    Mistake({"data.train": ["x/web", "x/code"]}, r"must be a prefix, or .* by name: .*={web: x/web, code: x/code}$"),
    Mistake(
        {"data.train": [0.7, "x/web.v2", 0.3, "x/code"]},
        r"use data.train={web-v2: x/web.v2, code: x/code}, data.weights={web-v2: 0.7, code: 0.3}$",
    ),
    Mistake({"data.train": "0.7 x/web 0.3 x/code"}, r"by name: .*x/code}, data.weights={web: 0.7, code: 0.3}$"),
    Mistake({"data.valid": "1 x/web 3 x/code"}, r"data.valid must be .*; use data.valid={web: x/web, code: x/code}$"),
    Mistake({"data.train": ["x/a", "y/a"]}, r"data.train must be a prefix, or several by name"),
    Mistake({"data.train": {2024: "a", "b": "b"}}, r"names in data.train must be text; got 2024: .*'2024': a"),
    Mistake(
        {"data.train": {"2024": "a", "b": "b"}, "data.weights": {2024: 1, "b": 2}},
        r"names in data.weights must be text; got 2024: .*; use data.weights={'2024': 1, b: 2}$",
    ),
    Mistake({"data.train": {"a": "x/y", "b": "./x/../x/y"}}, r"data.train.a and data.train.b are the same dataset"),
    Mistake({"data.weights": {"web": 1}}, r"data.weights has no effect with one dataset .*; use data.weights=null$"),
    Mistake({"data.phases": [{"first_sample": 1, "weights": {}}]}, r"data.phases has no effect .*data.phases=null$"),
    Mistake(TWO | {"data.weights": [1, 2]}, r"data.weights must be numbers by name, such as .*; got \[1, 2\]"),
    Mistake(TWO | {"data.weights": {"web": -1, "code": 1}}, r"data.weights.web must be at least 0.0; got -1"),
    Mistake(TWO | {"data.weights": {"web": 3, "kode": 1}}, r"names kode, which .*use data.weights={web: 3, code: 1}$"),
    Mistake(TWO | {"data.weights": {"web": 3}}, r"no weight for code of .*; use data.weights={web: 3, code: 1.0}$"),
    Mistake(TWO | {"data.weights": {"web": 0, "code": 0}}, r"must have a weight above 0; all are 0; use .*code: 1.0}$"),
    Mistake(TWO | {"data.weights": {"web": 0, "code": 1}}, r"data.train.web is never read, because its weight is 0"),
    Mistake({"data.train": {"a": "x", "b": "x"}}, r"data.train.a and data.train.b are the same dataset \(x\), .*=x$"),
    Mistake(
        {"data.train": {"a": "x", "b": "y", "c": "x"}, "data.weights": {"a": 1, "b": 2, "c": 3}},
        r"data.train.a and data.train.c are the same .*use data.train={a: x, b: y}, data.weights={a: 1, b: 2}$",
    ),
    Mistake(
        TWO | {"data.phases": [{"first_sample": 9, "weights": {"web": 1, "cod": 3}}]},
        r"data.phases\[0\].weights names cod, .*use data.phases=\[{first_sample: 9, weights: {web: 1, code: 3}}\]$",
    ),
    Mistake(
        TWO | {"data.phases": [PHASE | {"first_sample": 9}, PHASE | {"first_sample": 4}]},
        r"of each entry of data.phases must be above .*; got 9, 4; use data.phases=\[{.*first_sample: 4}, {",
    ),
    Mistake(TWO | {"data.phases": [PHASE | {"first_sample": 0}]}, r"data.phases\[0\].first_sample must be at least 1"),
    Mistake(TWO | {"data.phases": [{"frst_sample": 9, **PHASE}]}, r"first_sample must be given", also=1),
    Mistake(TWO | CLASSES, r"data.train must be one dataset for .*head=classification, .*; use data.train=a$"),
]
