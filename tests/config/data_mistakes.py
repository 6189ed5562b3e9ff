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
    Mistake(TWO | {"data.train": ["web", "code"]}, r"data.train must be text; got \['web', 'code'\]"),
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
